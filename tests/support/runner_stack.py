"""A stack as tests use it: its processes by name, their ends by signals, and a block in which it runs."""

import os
import signal
from typing import Self

from headrace_runner import stack
from headrace_runner.process import Process

_ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Stack(stack.Stack):
    @property
    def names(self) -> tuple[str, ...]:
        """The processes: "envoy", "transformer", "predictor-0", …, "logger"."""
        return tuple(self._processes)

    def pid(self, name: str) -> int:
        """The process id; raises ProcessLookupError between two runs."""
        return self._processes[name].pid

    def log(self, name: str) -> str:
        """The output of a process so far."""
        return self._processes[name].log.read_text(errors="replace")

    async def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal; returns after the process's end if the signal asks for it. The process is restarted."""
        await kill(self._processes[name], signum)

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def kill(process: Process, signum: signal.Signals) -> None:
    """Sends a signal to the running process; returns after its end if the signal asks for it."""
    running = process._process
    os.kill(process.pid, signum)
    if running is not None and signum in _ENDING:
        await running.wait()
