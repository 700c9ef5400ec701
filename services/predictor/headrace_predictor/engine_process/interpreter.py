"""Starts engine processes with an interpreter of their own, for engines that need other libraries than this package's.

The interpreter has this package's modules where they lie for this one, unless they are installed: then it must have
them installed too.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from headrace.errors import StartupError
from headrace.processes import how_it_ended

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[3]
_INSTALLED = {"site-packages", "dist-packages"}


class InterpreterHost:
    """An EngineStarter: `python -m module FD PARENT` for each engine, with `threads` threads, 0: all cores but one."""

    def __init__(self, python: Path | None, module: str, threads: int, prepare: str = "") -> None:
        self.prepare = prepare
        self._python = str(python or sys.executable)
        self._module = module
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)

    async def start_engine(self, connection: socket.socket) -> int:
        """Starts an engine process that serves a socket; returns its process id; raises StartupError."""
        command = (self._python, "-m", self._module, str(connection.fileno()), str(os.getpid()))
        try:
            # On this thread: the process ends with the thread that has started it, see host.py.
            process = subprocess.Popen(  # noqa: ASYNC220  # It returns when the interpreter has been executed.
                command, stdin=subprocess.DEVNULL, pass_fds=(connection.fileno(),), env=self._environment()
            )
        except OSError as error:
            raise StartupError(f"the interpreter of engines cannot be started: {error}") from None
        threading.Thread(target=_wait, args=(process,), name=f"wait-{process.pid}", daemon=True).start()
        return process.pid

    def _environment(self) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": str(self._threads)} | os.environ
        if not _INSTALLED.intersection(_SOURCE.parts):
            paths = (str(_SOURCE), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment


def _wait(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status not in (0, os.EX_CONFIG):
        logger.error("engine process %d %s", process.pid, how_it_ended(status))
