"""One supervised process: started, restarted with backoff when it ends, stopped in order.

Its output goes straight to the log file, so none is lost if the supervisor is killed. The process leads its own
session: Ctrl-C reaches only the runner, which stops everything in order.

A service can be replaced without losing a call (headrace/rpc/server/listeners.py). `replace` starts a successor, which
loads while the running one serves, and listens on the same port once it can serve. Then the running one retires: it
takes no new calls and ends when its calls have ended. One predecessor at a time may be retiring; the next replacement
waits for it, and ends it after its timeout.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process as Running
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace import processes
from headrace.errors import StartupError
from headrace.rpc.server.listeners import NOTIFY_SOCKET, READY_MESSAGE, RETIRE

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
STEADY_S = 30.0  # After a run of this length the backoff starts at the first delay again.

_LOAD_TIMEOUT_S = 1800.0  # The same as compose.yaml's time for a download.
_TAIL_BYTES = 4096
_REASONED = (os.EX_CONFIG, os.EX_TEMPFAIL)  # Exit codes after a line with the reason.

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProcessSpec:
    """The command of a process and how it ends.

    An exit code in `fatal_exit_codes` means that a restart cannot help, until the process has served once. After
    SIGTERM the process has `grace_s` seconds before SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    grace_s: float
    fatal_exit_codes: frozenset[int] = frozenset({os.EX_CONFIG})


class Process:
    """Keeps one `ProcessSpec` running from `start` to `stop`."""

    def __init__(self, spec: ProcessSpec, log_folder: Path, working_folder: Path, say: Say) -> None:
        self.spec = spec
        self.log = log_folder / f"{spec.name}.log"
        self._working_folder = working_folder
        self._say = say
        self._process: Running | None = None
        self._stopping = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None
        self.has_served = False  # Then its settings are right: whatever ends it may pass.
        self._replaced = asyncio.Event()
        self._retiring: asyncio.Task[None] | None = None
        self._end_of_predecessor: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """The running process's id; raises ProcessLookupError between two runs."""
        if self._process is None or self._process.returncode is not None:
            raise ProcessLookupError(f"{self.spec.name} is not running")
        return self._process.pid

    def start(self) -> asyncio.Task[None]:
        """Starts supervision; the task ends at `stop`, or with StartupError and the log's last line."""
        self.log.write_bytes(b"")
        self._supervision = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.name}")
        return self._supervision

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
                _signal(successor, signal.SIGKILL)
                await _end_of(successor)
                raise
        self.spec = spec
        self._process = successor
        self._replaced.set()
        self._retiring = asyncio.create_task(self._retire(running, patience_s), name=f"retirement of {spec.name}")

    async def predecessor_ended(self) -> None:
        """Returns when the process that was replaced last has ended; its patience limits the wait."""
        if self._retiring is not None:
            await self._retiring

    async def stop(self) -> None:
        """Ends the process, by SIGKILL after its grace period, a predecessor that is retiring, and the supervision."""
        self._stopping.set()
        if self._supervision is None:
            return
        _signal(self._process, signal.SIGTERM)
        done, _ = await asyncio.wait({self._supervision}, timeout=self.spec.grace_s)
        if not done:
            self._say(f"{self.spec.name} did not stop within {self.spec.grace_s:g} s and was killed")
            _signal(self._process, signal.SIGKILL)
        await asyncio.gather(self._supervision, return_exceptions=True)
        await self.predecessor_ended()

    def last_line(self) -> str:
        """The log's last line that is not empty; empty if there is no log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        except FileNotFoundError:
            return ""
        return _message(next((line for line in reversed(lines) if line), ""))

    async def _supervise(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                exit_code = await self._live()
                reason = self.last_line() if exit_code in _REASONED else ""
                ended = processes.how_it_ended(exit_code) + (reason and f": {reason}")
            except OSError as error:
                # A full disk or too many processes: a retry may succeed.
                ended = f"could not be started ({error})"
            if self._stopping.is_set():
                return
            if time.monotonic() - started >= STEADY_S:
                delay_s = FIRST_DELAY_S
            self._say(f"{self.spec.name} {ended}; starting it again in {delay_s:g} s (see {self.log})")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _live(self) -> int:
        """Runs the process once; returns its exit code; raises StartupError if a restart cannot help."""
        self._process = await self._run(self.spec.command)
        if self._stopping.is_set():
            _signal(self._process, signal.SIGTERM)
        exit_code = await self._until_end(self._process)
        if exit_code in self.spec.fatal_exit_codes and not self.has_served and not self._stopping.is_set():
            raise StartupError(self.last_line() or f"{self.spec.name} {processes.how_it_ended(exit_code)}")
        return exit_code

    async def _until_end(self, process: Running) -> int:
        """Waits for the end of the current process, also after a replacement; returns its exit code."""
        while True:
            end = asyncio.create_task(_end_of(process), name=f"{self.spec.name}'s end")
            replaced = asyncio.create_task(self._replaced.wait(), name=f"{self.spec.name}'s successor")
            await asyncio.wait({end, replaced}, return_when=asyncio.FIRST_COMPLETED)
            replaced.cancel()
            if self._process is process or self._process is None:
                return await end
            self._replaced.clear()
            self._end_of_predecessor, process = end, self._process

    async def _retire(self, process: Running, patience_s: float) -> None:
        """Lets a predecessor finish its calls for its patience, or until the stop, and then ends it as at a stop."""
        _signal(process, RETIRE)
        end = asyncio.create_task(process.wait(), name=f"{self.spec.name}'s predecessor")
        stop = asyncio.create_task(self._stopping.wait(), name=f"{self.spec.name}'s stop")
        await asyncio.wait({end, stop}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            _signal(process, signum)
            await asyncio.wait({end}, timeout=self.spec.grace_s)

    async def _until_listening(self, successor: Running, ready: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readiness = asyncio.create_task(loop.sock_recv(ready, len(READY_MESSAGE)), name="readiness")
        end = asyncio.create_task(successor.wait(), name="successor's end")
        try:
            await asyncio.wait({readiness, end}, timeout=_LOAD_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise StartupError(f"the new {self.spec.name} did not start: {self.last_line()}")
            if not readiness.done():
                raise StartupError(f"the new {self.spec.name} did not serve within {_LOAD_TIMEOUT_S:g} s")
        finally:
            for task in (readiness, end):
                task.cancel()
            await asyncio.gather(readiness, end, return_exceptions=True)

    async def _run(self, command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> Running:
        environment = self.spec.environment if environment is None else environment
        with self._open_log() as log:
            return await spawn(command, environment, self._working_folder, log)

    def _open_log(self) -> IO[bytes]:
        try:
            log = self.log.open("ab+", buffering=0)  # A write that fails at its end would leave a process behind.
            end = log.tell()
            log.seek(max(0, end - _TAIL_BYTES))
            tail = log.read()
            if tail and not tail.endswith(b"\n"):  # A full disk has cut the last line.
                try:
                    log.write(b"\n")
                except OSError:
                    log.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
            return log
        except OSError as error:
            self._say(f"{self.log} cannot be written ({error.strerror}): the output of {self.spec.name} is lost")
            return Path(os.devnull).open("ab")


async def spawn(
    command: tuple[str, ...], environment: Mapping[str, str], working_folder: Path, log: IO[bytes]
) -> Running:
    """Starts a command that leads its own session, writes to the log, and dies with this process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", processes.__file__, str(os.getpid()), *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=working_folder,
        env=dict(environment),
        start_new_session=True,
    )


def _signal(process: Running | None, signum: signal.Signals) -> None:
    """Sends a signal to a process, if there is one that has not ended."""
    with suppress(ProcessLookupError):
        if process is not None and process.returncode is None:
            os.kill(process.pid, signum)


async def _end_of(process: Running) -> int:
    """Returns the exit code of a process when it has ended, and kills its remaining children."""
    exit_code = await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return exit_code


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


def _message(line: str) -> str:
    """The message of a log line: that of a service's JSON, or the line itself."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    return str(fields.get("message", line)) if isinstance(fields, dict) else line
