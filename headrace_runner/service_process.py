"""A service as a supervised process that can be replaced without losing a call: see headrace/rpc/server/listeners.py.

`replace` starts a successor, which loads while the running one serves, and listens on the same port once it can serve.
Then the running one retires: it takes no new calls and ends when its calls have ended. One predecessor at a time may be
retiring; the next replacement waits for it, and ends it after its timeout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process as Running
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headrace.errors import StartupError
from headrace.rpc.server.listeners import NOTIFY_SOCKET, READY_MESSAGE, RETIRE
from headrace_runner.process import Process, ProcessSpec, signal_to

_LOAD_TIMEOUT_S = 1800.0  # The same as compose.yaml's time for a download.


class ServiceProcess(Process):
    """A `Process` that runs a service's command; its environment sets `listen`."""

    _retiring: _Retiring | None = None
    _end_of_predecessor: asyncio.Task[int] | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replaced = asyncio.Event()

    async def replace(self, spec: ProcessSpec, listen: str, patience_s: float) -> None:
        """Replaces the process by one of `spec`; returns when it takes all new calls.

        The previous one has `patience_s` to finish its calls. `listen` is the variable that sets how the service
        listens. Raises StartupError with one line if the successor does not start: the running one continues as before.
        """
        await self.predecessor_ended()
        running = self._process
        if running is None or running.returncode is not None:
            raise StartupError(f"{self.spec.name} is starting; try again")
        with (
            _short_path() as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
        ):
            ready.setblocking(False)
            ready.bind(f"{folder}/ready")
            own = {listen: "take-over", NOTIFY_SOCKET: ready.getsockname()}
            successor = await self._run(spec.command, {**spec.environment, **own})
            try:
                await self._until_listening(successor, ready)
                if self._process is not running or running.returncode is not None:
                    raise StartupError(f"{self.spec.name} ended during its replacement and was restarted")
            except BaseException:
                signal_to(successor, signal.SIGKILL)
                await super()._until_end(successor)
                raise
        self.spec = spec
        self._retiring = _Retiring(running, patience_s)
        self._process = successor
        self._replaced.set()
        signal_to(running, RETIRE)

    async def predecessor_ended(self) -> None:
        """Returns when the process that was replaced last has ended; its patience limits the wait."""
        if self._retiring is not None:
            await self._retiring.end(self.spec.grace_s)
            self._retiring = None

    async def stop(self) -> None:
        """Ends the process, and a predecessor that is retiring."""
        retiring, self._retiring = self._retiring, None
        if retiring is not None:
            retiring.terminate()
        await super().stop()
        if retiring is not None:
            await retiring.end(self.spec.grace_s)

    async def _until_end(self, process: Running) -> int:
        """Waits for the end of the current process, also after a replacement; returns its exit code."""
        while True:
            ended = asyncio.create_task(super()._until_end(process), name=f"{self.spec.name}'s end")
            replaced = asyncio.create_task(self._replaced.wait(), name=f"{self.spec.name}'s successor")
            await asyncio.wait({ended, replaced}, return_when=asyncio.FIRST_COMPLETED)
            replaced.cancel()
            if self._process is process or self._process is None:
                return await ended
            self._replaced.clear()
            self._end_of_predecessor, process = ended, self._process

    async def _until_listening(self, successor: Running, ready: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readiness = asyncio.create_task(loop.sock_recv(ready, len(READY_MESSAGE)), name="readiness")
        ended = asyncio.create_task(successor.wait(), name="successor's end")
        try:
            await asyncio.wait({readiness, ended}, timeout=_LOAD_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StartupError(f"the new {self.spec.name} did not start: {self.last_line()}")
            if not readiness.done():
                raise StartupError(f"the new {self.spec.name} did not serve within {_LOAD_TIMEOUT_S:g} s")
        finally:
            for task in (readiness, ended):
                task.cancel()
            await asyncio.gather(readiness, ended, return_exceptions=True)


@contextmanager
def _short_path() -> Iterator[str]:
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


class _Retiring:
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
