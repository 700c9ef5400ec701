"""A server of another project as a child process: started, waited for, ended with its descendants.

    async with server_process("Triton", command, log, environment) as process:
        await until(lambda: accepts(port), process, 60.0)

It ends with this process, however that ends (headrace/processes.py).
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bench.contenders import ROOT
from headrace import processes

LOOPBACK = "127.0.0.1"

_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.2


class ServerProcess(NamedTuple):
    """A running process and the file that has its output."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid


@asynccontextmanager
async def server_process(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[ServerProcess]:
    """Starts a command in the repository's root; at the end its session gets SIGTERM, and SIGKILL if that fails.

    `environment` is added to this process's own.
    """
    tethered = (sys.executable, "-I", "-S", processes.__file__, str(os.getpid()), *command)
    # Without compiled modules a start takes longer.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *tethered,
            cwd=ROOT,
            env=inherited | dict(environment or {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield ServerProcess(name, process, log)
    finally:
        await _stop(process)


async def until(is_ready: Callable[[], Awaitable[bool]], server: ServerProcess, timeout_s: float) -> None:
    """Waits for a condition; raises RuntimeError if the process ends before, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not await is_ready():
        if server.process.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} does not answer; see {server.log}")
        await asyncio.sleep(_POLL_S)


async def accepts(port: int) -> bool:
    """Whether a port of this machine accepts connections."""
    try:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


async def answers(port: int, path: str) -> bool:
    """Whether a GET of a path has the status 200."""
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return (await reader.readline()).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False
    finally:
        writer.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
