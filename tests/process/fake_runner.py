"""`python -m headrace_runner up` with fake services: `python -m tests.process.fake_runner up SETTINGS`.

The name and the first argument make it look like a runner to `down`. It starts its services as a runner does, so these
are its children and end with it.
"""

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import psutil

from headrace_runner.__main__ import main, up
from headrace_runner.settings import ROOT, StackSettings
from headrace_runner.stack import Stack
from tests.support.free_ports import free_settings

FAKES = {
    kind: (sys.executable, "-m", "tests.process.fake_service", kind.upper())
    for kind in ("logger", "predictor", "transformer")
}


class Runner:
    """The process above."""

    def __init__(self, run_folder: Path) -> None:
        self.settings = free_settings(run_folder)
        command = (sys.executable, "-m", "tests.process.fake_runner", "up", self.settings.model_dump_json())
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.output: list[str] = []

    def wait_ready(self) -> list[psutil.Process]:
        """Its services, once it reports that they are ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if line.startswith("logs "):
                return self.services()
        raise AssertionError(f"never ready: {self.output}")

    def services(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def environment(self) -> dict[str, str]:
        """The environment in which `python -m headrace_runner` finds its stack."""
        return os.environ | {name.upper(): str(value) for name, value in self.settings.model_dump().items()}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def running(run_folder: Path) -> Iterator[Runner]:
    runner = Runner(run_folder)
    try:
        yield runner
    finally:
        runner.close()


def command(runner: Runner, action: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`python -m headrace_runner ACTION`, run in this process."""
    arguments = ["runner", action]
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, runner.environment() | settings),
        mock.patch.object(sys, "argv", arguments),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


if __name__ == "__main__":
    asyncio.run(up(Stack(StackSettings.model_validate_json(sys.argv[2]), commands=FAKES)))
