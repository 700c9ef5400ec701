"""The folder of one stack's state, which one runner at a time may hold.

The claim is a lock on `runner.pid`: the kernel releases it when its holder ends in any way, so the file of a killed
runner never blocks the next.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from headrace.errors import StartupError
from headrace_runner.settings import PROGRAM


class RunFolder:
    """Paths of a stack's state, and the claim on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.envoy_config = path / "envoy.yaml"
        self.roll_request, self.roll_outcome = path / "roll.json", path / "roll.outcome"
        self._pid_file = path / "runner.pid"
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Claims the folder; raises StartupError if another runner holds it or it is not writable."""
        try:
            self._claim()
        except OSError as error:
            raise self.unusable(error) from None

    def unusable(self, error: OSError) -> StartupError:
        """The one-line error for a folder that is not writable."""
        reason = error.strerror or type(error).__name__
        return StartupError(
            f"{self.path} cannot be written ({reason}); make room there, or set RUN_FOLDER=… to another folder"
        )

    def _claim(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = self._pid_file.open("a+")
        try:
            if not _try_lock(lock):
                running = f"a stack is running in {self.path} (process {self.holder()}); `{PROGRAM} down` stops it"
                raise StartupError(f"{running}, PORT_OFFSET=1000 starts another one")
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # Read-only by now, or full.
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def holder(self) -> int | None:
        """The process that holds the folder, if any."""
        try:
            with self._pid_file.open() as lock:
                return None if _try_lock(lock) else int(lock.read())
        except (FileNotFoundError, ValueError):
            return None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
