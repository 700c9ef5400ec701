"""Files that are whole or not there, whatever ends the process or the machine; locks that end with their process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import OverloadedError, may_pass

_POLL_S, _LONGEST_WAIT_S = 0.01, 5.0


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file, or replaces it: readers see all of the old contents or of the new ones. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """An flock on a file, of this process until `release` or its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, create: bool = False) -> FileLock | None:
        """The lock; None if another has it, or if the file is not there and not created."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT * create, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file for the block, which is short; raises OverloadedError if others hold it for too long."""
    ends_at = time.monotonic() + _LONGEST_WAIT_S
    while (lock := FileLock.take(path, create=True)) is None:
        if time.monotonic() >= ends_at:
            raise OverloadedError("the folder of batches is in use by other processes; retry later")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def refusing_when_full() -> Iterator[None]:
    """Makes OverloadedError of a full or read-only disk."""
    try:
        yield
    except OSError as error:
        if not may_pass(error):
            raise
        raise OverloadedError(f"the disk of the folder of batches: {error.strerror}; nothing was kept") from None


def older(paths: Iterable[Path], than: float) -> Iterator[Path]:
    """Those that were last written before a time, by the file system."""
    for path in list(paths):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < than:
                yield path


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # Removed meanwhile.
            size += path.stat().st_size
    return size
