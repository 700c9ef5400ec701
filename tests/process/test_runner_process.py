"""A process that ends is restarted with back-off, one that cannot run is not, and none survives its stop."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace_runner import process as supervision
from headrace_runner.process import Process, ProcessSpec
from tests.support.small_disk import small_disk
from tests.waiting import until


class Lines(list[str]):
    """The reported lines of a process; `await count(n)` waits for so many."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self._news.set()

    async def count(self, number: int) -> None:
        while len(self) < number:
            await self._news.wait()
            self._news.clear()


def script(name: str, source: str, grace_s: float = 5.0) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", source), dict(os.environ), port=0, grace_s=grace_s)


async def wait_for_log(process: Process, text: str) -> None:
    while text not in process.log.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("steady_s", "delays"), [(60.0, (0.02, 0.04, 0.05)), (0.0, (0.02, 0.02, 0.02))])
async def test_restarts_back_off_until_a_long_run_and_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_s: float, delays: tuple[float, ...]
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(supervision, "MAX_DELAY_S", 0.05)
    monkeypatch.setattr(supervision, "STEADY_S", steady_s)
    reports = Lines()
    process = Process(script("worker", "raise SystemExit(3)"), tmp_path, tmp_path, reports)
    process.start()
    await reports.count(3)
    await process.stop()
    assert [line.partition("; ")[0] for line in reports[:3]] == ["worker ended with exit code 3"] * 3
    assert all(f"again in {delay} s" in line for delay, line in zip(delays, reports[:3], strict=True))


async def test_after_one_good_start_no_exit_ends_the_stack_and_each_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.02)
    source = "import os, sys; sys.exit(print('worker: no room', file=sys.stderr) or os.EX_CONFIG)"
    reports = Lines()
    process = Process(script("worker", source), tmp_path, tmp_path, reports)
    process.has_served = True
    process.start()
    await reports.count(2)
    await process.stop()
    assert all(line.startswith("worker ended with exit code 78: worker: no room; starting") for line in reports[:2])


async def test_a_line_that_a_full_disk_has_cut_is_ended_before_the_next_run(tmp_path: Path) -> None:
    process = Process(script("worker", "import sys; sys.stderr.write('cut'); sys.exit(1)"), tmp_path, tmp_path, Lines())
    process.start()
    while process.log.read_text().count("cut") < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await process.stop()
    assert process.log.read_text().startswith("cut\ncut")


async def test_a_cut_line_without_room_for_its_end_goes_and_the_next_run_is_supervised(tmp_path: Path) -> None:
    page = "first\n".ljust(4096, "x")
    source = f"""import pathlib, sys, time
if pathlib.Path({str(tmp_path / "second")!r}).exists(): time.sleep(600)
pathlib.Path({str(tmp_path / "second")!r}).touch()
sys.stderr.write({page!r}); sys.exit(1)"""
    reports = Lines()
    with small_disk(tmp_path / "disk") as disk:
        process = Process(script("worker", source), disk.path, tmp_path, reports)
        supervised = process.start()
        disk.fill(spare_bytes=len(page))
        await reports.count(1)
        first = process._process
        await until(lambda: process._process is not first)
        assert process.log.read_text() == "first\n"
        await asyncio.wait({supervised}, timeout=1)
        assert psutil.pid_exists(process.pid)
        assert len(reports) == 1
        await process.stop()


@pytest.mark.parametrize(("limits", "expected"), [("256:5000", r"5000"), ("99:256", r"only 256 .* 65536 .*\n256")])
def test_children_have_as_many_descriptors_as_are_allowed_and_few_are_reported(limits: str, expected: str) -> None:
    source = "import os, headrace.processes as d; d.raise_descriptor_limit(print)\n"
    command = ("prlimit", f"--nofile={limits}", sys.executable, "-uc", f"{source}os.system('ulimit -n')")
    result = subprocess.run(command, capture_output=True, text=True)
    assert re.fullmatch(expected, result.stdout.strip()), result


async def test_a_process_starts_without_its_log(tmp_path: Path) -> None:
    reports = Lines()
    logs = tmp_path / "logs"
    logs.mkdir()
    process = Process(script("worker", "import time; time.sleep(600)"), logs, tmp_path, reports)
    process.start()
    process.log.unlink()
    logs.rmdir()
    await reports.count(1)
    assert reports == [f"{process.log} cannot be written (No such file or directory): the output of worker is lost"]
    while process._process is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert process.pid
    await process.stop()


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    source = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('ignoring', flush=True); time.sleep(600)"
    )
    reports = Lines()
    process = Process(script("worker", source, grace_s=0.2), tmp_path, tmp_path, reports)
    process.start()
    await wait_for_log(process, "ignoring")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    await process.stop()
    assert reports == ["worker did not stop within 0.2 s and was killed"]
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 5)
    assert len(family) == 2
    assert alive == []


async def test_a_stop_before_the_first_instruction_leaves_no_process(tmp_path: Path) -> None:
    reports = Lines()
    process = Process(script("worker", "import time; time.sleep(600)"), tmp_path, tmp_path, reports)
    supervised = process.start()
    await process.stop()
    assert supervised.done()
    with pytest.raises(ProcessLookupError):
        _ = process.pid
