"""Processes that run: how the runner starts one, ends it with its children, and lets one finish its calls."""

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process as Running
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headrace_runner import tether


async def spawn(
    command: tuple[str, ...], environment: Mapping[str, str], working_folder: Path, log: IO[bytes]
) -> Running:
    """Starts a command that leads its own session, writes to the log, and dies with this process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=working_folder,
        env=dict(environment),
        start_new_session=True,
    )


def signal_to(process: Running, signum: signal.Signals) -> None:
    """Sends a signal to a process unless it has ended."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.kill(process.pid, signum)


async def ended(process: Running) -> int:
    """Returns the exit code of a process when it has ended, and kills its remaining children."""
    exit_code = await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return exit_code


@contextmanager
def short_path() -> Iterator[str]:
    """A folder of this process's user, by a path that has room for a socket's name however long that of TMPDIR is."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        if sys.platform != "linux":
            yield folder
            return
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)


class Retiring:
    """A process that finishes its calls, terminated after its patience."""

    def __init__(self, process: Running, patience_s: float) -> None:
        self._process = process
        loop = asyncio.get_running_loop()
        self._ends_at = loop.time() + patience_s
        self._timer = loop.call_later(patience_s, self.terminate)

    def terminate(self) -> None:
        """Gives its calls the time of an ordinary stop."""
        self._timer.cancel()
        self._ends_at = asyncio.get_running_loop().time()
        signal_to(self._process, signal.SIGTERM)

    async def end(self, grace_s: float) -> None:
        """Returns when it has ended, killed after its patience and the grace period."""
        left_s = self._ends_at + grace_s - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), max(0.0, left_s))
        self._timer.cancel()
        signal_to(self._process, signal.SIGKILL)
        await self._process.wait()
