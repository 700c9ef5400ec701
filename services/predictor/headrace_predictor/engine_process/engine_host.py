"""The front's side of the host: starts it, at the first engine at the latest, and gets engine processes from it.

Owned by the event loop. A host that ends or does not answer is replaced at the next start of an engine.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from headrace.processes import how_it_ended

logger = logging.getLogger(__name__)

_START_S = 900.0  # Importing the libraries takes seconds, or minutes where the processor is emulated.
_ATTEMPTS = 2
_HOST = "headrace_predictor.engine_process.host"
# The library for numpy's products keeps threads, which a fork would not have.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class EngineHost:
    """See the module. `prepare` names a `module:function` that each engine process calls before it loads its model."""

    def __init__(self, prepare: str = "") -> None:
        self.prepare = prepare
        self._control: socket.socket | None = None
        self.pid = 0  # 0: there is none.
        self._engines = 0
        self._turn = asyncio.Lock()
        self._unread = b""
        self._started: asyncio.Future[int] | None = None
        self._listens = False

    def start(self) -> None:
        """Starts the host, if there is none."""
        if self._control is None:
            self._start()

    async def start_engine(self, connection: socket.socket) -> int:
        """Forks an engine process that serves a socket; returns its process id; raises StartupFault."""
        async with self._turn:
            for _ in range(_ATTEMPTS):
                try:
                    return await self._start_engine(connection)
                except (OSError, TimeoutError) as error:
                    logger.warning("the engine host failed: %s", str(error) or type(error).__name__)
                    await self._end()
        from headrace.errors import StartupFault  # Imports gRPC, which a host that starts need not wait for.

        raise StartupFault("no engine process can be started; see the log")

    async def close(self) -> None:
        """Ends the host and with it every engine process."""
        async with self._turn:
            await self._end()

    async def close_idle(self) -> None:
        """Ends the host if it has no engine process; a later one starts another host."""
        async with self._turn:
            if not self._engines:
                await self._end()

    async def _start_engine(self, connection: socket.socket) -> int:
        control = self._control or self._start()
        if not self._listens:
            control.setblocking(False)
            asyncio.get_running_loop().add_reader(control, self._receive, control)
            self._listens = True
        self._started = asyncio.get_running_loop().create_future()
        socket.send_fds(control, [b"."], [connection.fileno()])
        async with asyncio.timeout(_START_S):
            return await self._started

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-m", _HOST, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Linux divides processors among sessions; it dies with its parent anyway.
            )
        self.pid = process.pid
        process.returncode = 0  # This class waits for its end.
        return self._control

    def _receive(self, control: socket.socket) -> None:
        try:
            data = control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop_listening()
            if self._started is not None and not self._started.done():
                self._started.set_exception(ConnectionError("it has ended"))
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(line.decode().split())

    def _take(self, words: list[str]) -> None:
        self._engines += 1 if words[0] == "started" else -1
        if words[0] == "started" and self._started is not None and not self._started.done():
            self._started.set_result(int(words[1]))
        elif words[0] == "ended" and words[2] not in ("0", str(os.EX_CONFIG)):
            logger.error("engine process %s %s", words[1], how_it_ended(int(words[2])))

    def _stop_listening(self) -> None:
        if self._control is not None and self._listens:
            asyncio.get_running_loop().remove_reader(self._control)
        self._listens = False

    async def _end(self) -> None:
        if self._control is None:
            return
        self._stop_listening()
        self._control.close()
        pid, self.pid, self._control, self._unread, self._engines = self.pid, 0, None, b"", 0
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            await asyncio.to_thread(os.waitpid, pid, 0)
