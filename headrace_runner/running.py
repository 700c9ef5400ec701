"""Processes that run: how the runner starts one, and ends it with its children."""

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
