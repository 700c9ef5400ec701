"""The folder of one stack's state, which one runner at a time may hold.

The claim is a lock on `runner.pid`: the kernel drops it with its holder, however that ends, so a
file left behind by a killed runner never stands in the way.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from millrace.errors import StartupError


class RunFolder:
    """Paths of a stack's state, and the claim on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.envoy_config = path / "envoy.yaml"
        self._pid_file = path / "runner.pid"
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Makes the folder this process's; StartupError if another runner holds it."""
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = self._pid_file.open("a+")
        if not _try_lock(lock):
            lock.close()
            raise StartupError(f"a stack is running in {self.path} (process {self.holder()}); `make down` stops it")
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        """Gives the folder back."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def holder(self) -> int | None:
        """The process that holds the folder, if one does."""
        try:
            with self._pid_file.open("r+") as lock:
                return None if _try_lock(lock) else int(lock.read())
        except (FileNotFoundError, ValueError):
            return None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
