"""The file of a model's packed weights: one engine writes it while it packs them, later ones map it.

All processes that map a file share its memory. The file has no name until all of it is on the disk, so that nothing
half-written is left by a process that is killed. It begins with _HEADER: the mark, and the size of the whole.
"""

import fcntl
import logging
import mmap
import os
import shutil
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import NoReturn

import numpy as np

from headrace.errors import StartupFault
from headrace_predictor.engine.state.cache import Array

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQ")
_MARK = b"headrace"
_ALIGNMENT = 64
SUFFIX = ".weights"
_NAMES = f"{'[0-9a-f]' * 32}-*{SUFFIX}"
_UNUSED_S = 30 * 86400.0  # Until a file is deleted: another version of model or code has made it needless.


class PackedFile:
    """Memory for packed weights, in the order in which a decoder packs them.

    `is_packed`: the file was there, and has them. Else `keep` keeps what was packed, within the `most` bytes that the
    files of the folder may have. `size`: an estimate, not less than the packed weights. Without a path, where the disk
    has no room, or while another process packs, it is memory of this process alone.
    """

    def __init__(self, path: Path | None = None, size: int = 0, most: int = 0) -> None:
        self.is_packed = False
        self._end = _ALIGNMENT
        self._file = -1
        self._map: Array | None = None
        if path is None or not most or not hasattr(os, "O_TMPFILE"):
            return
        self._path = path
        try:
            self._open()
            if not self.is_packed:
                self._create(size, most)
        except BlockingIOError:
            logger.info("another engine packs weights; these are kept by a later start")
        except OSError as error:
            self._give_up(error)

    @property
    def is_mapped(self) -> bool:
        return self._map is not None

    def take(self, size: int) -> Array:
        """The next uint8 [size], aligned for vectors; raises StartupFault where the file does not fit the model."""
        begin = self._end
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._map is None:
            return aligned(size)
        if self._end > len(self._map):
            self._refuse()
        return self._map[begin : begin + size]

    def keep(self) -> None:
        """Gives the file its name once all of it is on the disk: in a thread, because that takes seconds."""
        if self._map is None:
            return
        if not self.is_packed:
            Thread(target=self._keep, name="keep-weights", daemon=True).start()
        elif self._end != len(self._map):
            self._refuse()

    def _open(self) -> None:
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(file).st_size
            if os.read(file, _HEADER.size) != _HEADER.pack(_MARK, size):
                logger.warning("%s is damaged; the weights are packed again", self._path)
                self._path.unlink()
                return
            # Private and writable, because compiled code takes arrays that can be written.
            memory = mmap.mmap(file, size, mmap.MAP_PRIVATE)
            memory.madvise(mmap.MADV_WILLNEED)
        finally:
            os.close(file)
        with suppress(OSError):  # The folder may be read-only.
            os.utime(self._path)
        self._map, self.is_packed = np.frombuffer(memory, np.uint8), True

    def _create(self, size: int, most: int) -> None:
        folder = self._path.parent
        if size > most:
            raise OSError(f"{size / 1e9:.2g} GB are more than PREDICTOR_WEIGHTS_CACHE_SIZE")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder, size, most)
        if shutil.disk_usage(folder).free < 2 * size:
            raise OSError(f"{folder} has less than {2 * size / 1e9:.2g} GB free")
        with ExitStack() as opened:
            # Held until the file is kept: of predictors that start at once, one writes it.
            lock = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            opened.callback(os.close, self._file)
            # All of it: to write a page for which the disk has no room would end the process.
            os.posix_fallocate(self._file, 0, size)
            self._map = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
            self._opened = opened.pop_all()

    def _keep(self) -> None:
        try:
            os.truncate(self._file, self._end)
            os.pwrite(self._file, _HEADER.pack(_MARK, self._end), 0)
            os.fsync(self._file)
            # Only with a folder's descriptor, which an absolute path does not use, is the link followed.
            with suppress(FileExistsError):  # Another engine was faster.
                os.link(f"/proc/self/fd/{self._file}", self._path.absolute(), src_dir_fd=self._file)
        except OSError as error:
            self._give_up(error)
        finally:
            self._opened.close()

    def _refuse(self) -> NoReturn:
        with suppress(OSError):
            self._path.unlink()
        raise StartupFault(f"{self._path} does not fit its model; it is made again")

    def _give_up(self, error: OSError) -> None:
        logger.warning("packed weights are not kept for the next start: %s", error)
        self._map = None


def _make_room(folder: Path, size: int, most: int) -> None:
    """Deletes what was not used for long, and what was used longest ago where it leaves no room for `size` bytes."""
    found = []
    for path in folder.glob(_NAMES):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    total = size + sum(other for _, other, _ in found)
    for used, other, path in sorted(found):
        if total > most or used < time.time() - _UNUSED_S:
            path.unlink(missing_ok=True)
            total -= other


def aligned(size: int) -> Array:
    """Bytes [size] at an address for vectors."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]
