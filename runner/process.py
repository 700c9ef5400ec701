"""One supervised process: started, started again with back-off when it ends, stopped in order.

Output goes straight to the log file, so a supervisor that is killed loses none of it. The process
leads a session of its own: Ctrl-C reaches the runner alone, which stops everything in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process as Running
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from millrace.errors import StartupError
from runner import tether

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
STEADY_S = 30.0  # Who ran so long begins with the first delay again.

_TAIL_BYTES = 4096
_ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProcessSpec:
    """What runs and how it ends.

    An exit code in `fatal_exit_codes` means that starting again cannot help. After SIGTERM it has
    `grace_s` seconds before SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    grace_s: float
    fatal_exit_codes: frozenset[int] = frozenset({os.EX_CONFIG})


class Process:
    """Keeps one `ProcessSpec` running from `start` to `stop`."""

    def __init__(
        self,
        spec: ProcessSpec,
        log_folder: Path,
        working_folder: Path,
        say: Say,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`prepare` is called before each start: it makes what the process finds in its folder."""
        self.spec = spec
        self._prepare = prepare
        self.log = log_folder / f"{spec.name}.log"
        self._working_folder = working_folder
        self._say = say
        self._process: Running | None = None
        self._stopping = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None
        self._replaced = asyncio.Event()
        self._predecessors: set[asyncio.Task[int]] = set()  # Their ends.

    @property
    def pid(self) -> int:
        """The running process's id; ProcessLookupError between two lives."""
        if self._process is None or self._process.returncode is not None:
            raise ProcessLookupError(f"{self.spec.name} is not running")
        return self._process.pid

    def start(self) -> asyncio.Task[None]:
        """Begins to supervise; the task ends at `stop`, or with StartupError, the log's last line."""
        self.log.write_bytes(b"")
        self._supervision = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.name}")
        return self._supervision

    async def kill(self, signum: signal.Signals) -> None:
        """Sends a signal to the running process; where the signal asks it to end, returns when it has."""
        process = self._process
        os.kill(self.pid, signum)
        if process is not None and signum in _ENDING:
            await process.wait()

    async def stop(self) -> None:
        """Ends the process, by force after its grace, and the supervision."""
        self._stopping.set()
        if self._supervision is None:
            return
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._supervision}, timeout=self.spec.grace_s)
        if not done:
            self._say(f"{self.spec.name} did not stop within {self.spec.grace_s:g} s and was killed")
            self._signal(signal.SIGKILL)
        await asyncio.gather(self._supervision, return_exceptions=True)

    def last_line(self) -> str:
        """The last line of the log that says something; empty where there is no log."""
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
                ended = _how(await self._live())
            except OSError as error:
                # A full disk, or too many processes: it may pass.
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
        """One life of the process; its exit code; StartupError where another life cannot help."""
        if self._prepare is not None:
            self._prepare()
        self._process = await self._spawn()
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        exit_code = await self._until_end(self._process)
        if exit_code in self.spec.fatal_exit_codes and not self._stopping.is_set():
            raise StartupError(self.last_line() or f"{self.spec.name} {_how(exit_code)}")
        return exit_code

    async def _spawn(self) -> Running:
        """Begins a life of the process."""
        return await self._run(self.spec.command)

    async def _until_end(self, process: Running) -> int:
        """Waits for the end of the life that serves, whichever that is by then; its exit code."""
        while True:
            ended = asyncio.create_task(self._ended(process), name=f"{self.spec.name}'s end")
            replaced = asyncio.create_task(self._replaced.wait(), name=f"{self.spec.name}'s successor")
            await asyncio.wait({ended, replaced}, return_when=asyncio.FIRST_COMPLETED)
            replaced.cancel()
            if self._process is process or self._process is None:
                return await ended
            self._replaced.clear()
            self._predecessors.add(ended)
            ended.add_done_callback(self._predecessors.discard)
            process = self._process

    def _succeed(self, successor: Running) -> None:
        """Supervises another process instead of the one before, which goes on as a predecessor."""
        self._process = successor
        self._replaced.set()

    async def _ended(self, process: Running) -> int:
        """Waits for a process's end; its exit code."""
        exit_code = await process.wait()
        end_group(process.pid)
        return exit_code

    async def _run(self, command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> Running:
        with self.log.open("ab") as log:
            environment = self.spec.environment if environment is None else environment
            return await spawn(command, environment, self._working_folder, log)

    def _signal(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signum)


async def spawn(
    command: tuple[str, ...], environment: Mapping[str, str], working_folder: Path, log: IO[bytes]
) -> Running:
    """Starts a command that leads a session of its own, writes to the log, and dies with this process."""
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


def end_group(leader: int) -> None:
    """Kills what a process that has ended left behind of its own children."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _message(line: str) -> str:
    """A line of a log as a reader wants it: of a service's JSON the message."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    return str(fields.get("message", line)) if isinstance(fields, dict) else line


def _how(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
