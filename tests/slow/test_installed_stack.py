"""`headrace serve` of the wheel: without a checkout, in folders whose paths have spaces, with a long TMPDIR.

The packages that it requires are those of the environment that runs the tests. INSTALLED=/path/to/environment tests
one in which pip has installed a wheel, of this Python or another.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace_runner.settings import ROOT
from tests.support.free_ports import free_offset
from tests.support.installed import built_wheel, environment_of_a_user, install_wheel, link_packages, new_environment

START_S = 180
pytestmark = pytest.mark.timeout(300)  # The first one installs and starts the stack.
MODELS = ROOT / "models"


class InstalledStack:
    """A folder of a user who has installed the wheel and serves a copy of the storyteller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my models"
        shutil.copytree(MODELS / "storyteller", self.folder / "teller")
        environment = Path(os.environ.get("INSTALLED") or folder / "an environment")
        if not environment.exists():
            link_packages(new_environment(environment))
            install_wheel(built_wheel(folder), environment)
        long = folder / ("t" * max(1, 100 - len(str(folder))))
        long.mkdir()
        self.program = environment / "bin" / "headrace"
        self.offset = free_offset()
        own = {"TMPDIR": str(long), "PORT_OFFSET": str(self.offset), "DEVICE": "cpu"}
        self._environment = environment_of_a_user() | own

    def start(self) -> None:
        output = self.folder / "output"
        with output.open("w") as file:
            command = [self.program, "serve", "chat=./teller"]
            self.process = psutil.Popen(
                command, cwd=self.folder, env=self._environment, stdout=file, stderr=subprocess.STDOUT
            )
        give_up_at = time.monotonic() + START_S
        while "ready in" not in output.read_text():
            assert self.process.poll() is None, output.read_text()
            assert time.monotonic() < give_up_at, output.read_text()
            time.sleep(0.05)

    def run(self, *arguments: str) -> str:
        """The output of the command, which must succeed."""
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def predictor(self) -> psutil.Process:
        (found,) = (child for child in self.process.children() if "headrace_predictor" in " ".join(child.cmdline()))
        return found


@pytest.fixture(scope="module")
def installed() -> Iterator[InstalledStack]:
    # pytest's own folders have longer paths.
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        stack = InstalledStack(Path(folder))
        try:
            stack.start()
            yield stack
        finally:
            if stack.process.is_running():
                stack.process.send_signal(signal.SIGTERM)
                stack.process.wait(START_S)


def test_nothing_of_the_checkout_is_used(installed: InstalledStack) -> None:
    processes = [installed.process, *installed.process.children(recursive=True)]
    kinds = ("headrace_runner", "headrace_logger", "headrace_predictor", "headrace_transformer", "envoy")
    commands = [" ".join(process.cmdline()) for process in processes]
    assert all(any(kind in command for command in commands) for kind in kinds)
    assert {process.cwd() for process in processes} == {str(installed.folder)}
    ours = {
        file.path
        for process in processes
        for file in process.memory_maps()
        if file.path.startswith(str(ROOT)) and ".venv" not in file.path
    }
    assert ours == set()
    state = {path.name for path in installed.folder.iterdir()}
    assert state == {"teller", "output", f".run-{installed.offset}"}


def test_the_doctor_finds_the_stack(installed: InstalledStack) -> None:
    lines = installed.run("doctor").splitlines()
    assert [line.split()[1] for line in lines] == [
        *("python", "packages", "settings", "ports", "memory", "disk", "processor", "docker")
    ]
    assert "a stack is running in" in lines[3]


def test_a_prompt_is_answered_recorded_and_counted(installed: InstalledStack) -> None:
    answer = installed.run("chat", "--max-tokens", "20", "--temperature", "0", "Tell me of a fox.")
    assert len(answer.split()) > 5

    def recorded() -> bool:
        return "Tell me of a fox." in installed.run("log", "-n", "5", "--json")

    while not recorded():  # Or pytest's timeout.
        time.sleep(0.2)
    assert installed.run("usage", "--model", "chat").splitlines()[1].split()[:2] == ["-", "chat"]


def test_it_rolls(installed: InstalledStack) -> None:
    before = installed.predictor().pid
    assert "every service has been replaced" in installed.run("roll")
    assert installed.predictor().pid != before
    assert len(installed.run("chat", "--max-tokens", "20", "Tell me of a fox.").split()) > 5


def test_it_stops(installed: InstalledStack) -> None:
    assert installed.run("down") == "stopped\n"
    assert installed.process.wait(START_S) == 0
