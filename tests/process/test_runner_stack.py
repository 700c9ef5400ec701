"""The runner keeps a stack of services running behind the real Envoy, and leaves no process behind.

The services are fakes that implement only gRPC health.
"""

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import StartupError
from headrace_runner import process
from headrace_runner import stack as stack_module
from headrace_runner.settings import ROOT
from tests.process.fake_runner import FAKES, Runner, command, running
from tests.support.free_ports import free_settings, start_stack
from tests.support.logger_process import free_port
from tests.support.runner_stack import Stack
from tests.waiting import until


async def check(target: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


def gone(processes: list[psutil.Process], within_s: float = 30.0) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


async def test_a_killed_predictor_is_restarted_behind_the_gateway(tmp_path: Path) -> None:
    reports: list[str] = []
    stack = await start_stack(tmp_path / "run", {"predictors": 2}, commands=FAKES, say=reports.append)
    processes = [psutil.Process(stack.pid(name)) for name in stack.names]
    try:
        assert stack.names == ("envoy", "transformer", "predictor-0", "predictor-1", "logger")
        assert await check(stack.gateway, "ready") == health_pb2.HealthCheckResponse.SERVING
        assert await check(stack.addresses["inner"]) == health_pb2.HealthCheckResponse.SERVING

        before = stack.pid("predictor-0")
        await stack.kill("predictor-0")
        await stack.wait_ready()
        assert stack.pid("predictor-0") != before
        assert [line.partition(" (see")[0] for line in reports] == [
            f"starting; logs are in {tmp_path / 'run' / 'logs'}",
            "predictor-0 was ended by SIGKILL; starting it again in 0.2 s",
        ]
        processes.append(psutil.Process(stack.pid("predictor-0")))
    finally:
        await stack.stop()
    assert gone(processes, within_s=0)
    assert all("did not stop" not in line for line in reports)


async def test_the_other_processes_start_when_a_predictor_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "_HEAD_START_S", 60.0)
    begin = tmp_path / "begin"
    waits = f"""
import os, time
while not os.path.exists({str(begin)!r}):
    time.sleep(0.01)
os.execv({sys.executable!r}, {FAKES["predictor"]!r})
"""
    stack = Stack(free_settings(tmp_path / "run"), commands=FAKES | {"predictor": (sys.executable, "-c", waits)})
    starting = asyncio.create_task(stack.start())
    try:
        await until(lambda: is_running(stack, "predictor-0"))
        assert not starting.done()
        assert not any(is_running(stack, name) for name in ("envoy", "transformer", "logger"))
        begin.touch()
        await starting
        await stack.wait_ready()
    finally:
        await stack.stop()


def is_running(stack: Stack, name: str) -> bool:
    try:
        return stack.pid(name) > 0
    except ProcessLookupError:
        return False


async def test_a_stack_without_own_predictors_waits_for_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "_REPORT_S", 0.5)
    reports: list[str] = []
    port = free_port()
    settings = free_settings(tmp_path / "run", predictors=0, predictor_endpoints=f"127.0.0.1:{port},127.0.0.1:1")
    stack = Stack(settings, commands=FAKES, say=reports.append)
    await stack.start()
    try:
        assert stack.names == ("envoy", "transformer", "logger")
        ready = asyncio.create_task(stack.wait_ready())
        await until(lambda: "waiting for a predictor of PREDICTOR_ENDPOINTS" in reports)
        assert not ready.done()
        elsewhere = await start_stack(tmp_path / "elsewhere", {"predictor_port": port}, commands=FAKES)
        try:
            # One of the two is enough.
            await ready
            assert await check(stack.addresses["inner"]) == health_pb2.HealthCheckResponse.SERVING
        finally:
            await elsewhere.stop()
    finally:
        await stack.stop()


def up(environment: dict[str, str], prepare: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m headrace_runner up`, which ends by itself."""
    return subprocess.run(
        (sys.executable, "-m", "headrace_runner", "up"),
        env=environment,
        cwd=ROOT,
        preexec_fn=prepare,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("case", ["no folder", "no room"])
def test_an_unwritable_folder_is_refused_in_one_line_with_advice(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "run"
    if case == "no folder":
        folder.write_text("")
    settings = free_settings(folder)
    ports = {name: str(numbers[0]) for name, numbers in settings.ports().items()}

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ended = up(os.environ | ports | {"RUN_FOLDER": str(folder)}, no_room if case == "no room" else None)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert f"{folder} cannot be written (" in ended.stderr
    assert "set RUN_FOLDER=… to another" in ended.stderr


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "dotenv.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    ended = up(os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


async def test_a_service_that_cannot_start_ends_the_stack_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, started = process.spawn, []

    async def spawn_on_record(*arguments: Any) -> process.Running:
        running = await spawn(*arguments)
        started.append(running.pid)
        return running

    monkeypatch.setattr(process, "spawn", spawn_on_record)
    refuse = (
        "import os, sys; sys.stderr.write('predictor: DEVICE=cuda, but there is no CUDA\\n'); sys.exit(os.EX_CONFIG)"
    )
    commands = FAKES | {"predictor": (sys.executable, "-c", refuse)}
    with pytest.raises(StartupError, match=r"^predictor: DEVICE=cuda, but there is no CUDA$"):
        await start_stack(tmp_path / "run", {}, commands=commands)
    assert len(started) == 4
    assert not any(map(psutil.pid_exists, started))


async def test_an_envoy_that_refuses_its_configuration_is_a_startup_error(tmp_path: Path) -> None:
    refuse = (sys.executable, "-c", "import sys; sys.exit('error initializing configuration')")
    with pytest.raises(StartupError, match="error initializing configuration"):
        await start_stack(tmp_path / "run", {}, commands=FAKES | {"envoy": refuse})


async def test_taken_ports_are_named_at_once_with_their_settings(tmp_path: Path) -> None:
    settings = free_settings(tmp_path / "run", predictors=2)
    gateway, logger = settings.gateway_port, settings.logger_port
    moved = "set PORT_OFFSET=1000, which moves all ports, or GATEWAY_PORT, LOGGER_PORT to others"
    taken = f"^ports {gateway}, {logger} are taken; {moved}$"
    with ExitStack() as held:
        for port in (gateway, logger):
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(StartupError, match=taken):
            await Stack(settings).start()
    port = settings.predictor_ports[1]
    taken = f"^port {port} is taken; set PREDICTOR_PORT=… to another$"
    reports: list[str] = []
    with closing(socket.create_server(("127.0.0.1", port))), pytest.raises(StartupError, match=taken):
        await Stack(settings, say=reports.append).start()
    assert reports == []
    twice = settings.model_copy(update={"logger_port": settings.gateway_port})
    with pytest.raises(StartupError, match="is taken; set LOGGER_PORT"):
        await Stack(twice).start()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    with running(tmp_path / "run") as started:
        yield started


def test_a_killed_runner_leaves_no_process_and_the_next_starts_in_its_folder(runner: Runner) -> None:
    services = runner.wait_ready()
    runner.process.kill()
    assert gone(services)
    with running(runner.settings.run_folder) as following:
        assert len(following.wait_ready()) == 4


def test_a_second_up_is_refused_and_down_stops_the_first(runner: Runner) -> None:
    services = runner.wait_ready()
    assert len(services) == 4
    second = up(runner.environment())
    assert second.returncode == 1
    assert second.stderr.startswith("a stack is running in ")
    assert f"(process {runner.process.pid})" in second.stderr
    assert second.stderr.count("\n") == 1

    assert command(runner, "down").stdout == "stopped\n"
    assert runner.process.wait() == 0
    assert gone(services, within_s=0)
    assert command(runner, "down").stdout == "no stack is running\n"

    gateway = runner.settings.gateway
    assert [line.split()[0] for line in runner.output[-6:]] == [
        "gateway",
        "ready",
        "playground",
        "call",
        "check",
        "logs",
    ]
    assert any(re.fullmatch(rf"gateway +{gateway} +\d+\.\d s\n", line) for line in runner.output)
    assert {line.split()[0] for line in runner.output[1:-6]} == {"logger", "predictor-0", "transformer"}
    assert "\033" not in "".join(runner.output)
