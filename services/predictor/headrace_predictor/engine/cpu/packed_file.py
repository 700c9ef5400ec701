"""The file of a model's packed weights: one engine writes it while it packs them, later ones map it.

All processes that map a file share its memory. The file has no name until all of it is on the disk, so that nothing
half-written is left by a process that is killed. It begins with _HEADER: the mark, and the size of the whole.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

from headrace.errors import StartupFault
from headrace_predictor.engine.state.cache import Array

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQ")
_MARK = b"headrace"
_ALIGNMENT = 64
SUFFIX = ".weights"
_UNUSED_S = 30 * 86400.0  # Until a file is deleted: another version of model or code has made it needless.


class PackedFile:
    """Memory for packed weights, in the order in which a decoder packs them.

    `is_packed`: the file was there, and has them. Else `keep` keeps what was packed, within the `most` bytes that the
    files of the folder may have. `size`: an estimate, not less than the packed weights. Without a path, or where the
    disk has no room, it is memory of this process alone.
    """

    def __init__(self, path: Path | None = None, size: int = 0, most: int = 0) -> None:
        self.is_packed = False
        self._most = most
        self._end = _ALIGNMENT
        self._file = -1
        self._map: Array | None = None
        if path is None or size > most or not hasattr(os, "O_TMPFILE"):
            return
        self._path = path
        try:
            self._open()
            if not self.is_packed:
                self._create(size)
        except OSError as error:
            self._give_up(error)

    def take(self, size: int) -> Array:
        """The next uint8 [size], aligned for vectors; raises StartupFault where the file does not fit the model."""
        begin = self._end
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._map is not None and self._end > len(self._map):
            self._path.unlink(missing_ok=True)
            raise StartupFault(f"{self._path} does not fit its model; it is made again")
        if size and self._map is not None and not self.is_packed:
            try:  # To write a page for which the disk has no room would end the process.
                os.posix_fallocate(self._file, begin, self._end - begin)
            except OSError as error:
                self._give_up(error)
        return aligned(size) if self._map is None else self._map[begin : begin + size]

    def keep(self) -> None:
        """Gives the file its name once all of it is on the disk: in a thread, because that takes seconds."""
        if self._map is not None and not self.is_packed:
            Thread(target=self._keep, name="keep-weights", daemon=True).start()

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

    def _create(self, size: int) -> None:
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._prune(size)
        if shutil.disk_usage(folder).free < 2 * size:
            raise OSError(f"{folder} has less than {2 * size / 1e9:.2g} GB free")
        self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.truncate(self._file, size)
        self._map = np.frombuffer(mmap.mmap(self._file, size), np.uint8)

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
            os.close(self._file)

    def _prune(self, size: int) -> None:
        """Deletes what was not used for long, and what was used longest ago where it leaves no room for `size` bytes."""
        files = self._path.parent.glob(f"*{SUFFIX}")
        found = sorted((status.st_mtime, status.st_size, path) for path in files if (status := path.stat()))
        total = size + sum(other for _, other, _ in found)
        for used, other, path in found:
            if total > self._most or used < time.time() - _UNUSED_S:
                path.unlink(missing_ok=True)
                total -= other

    def _give_up(self, error: OSError) -> None:
        logger.warning("packed weights are not kept for the next start: %s", error)
        self._map = None


def aligned(size: int) -> Array:
    """Bytes [size] at an address for vectors."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]
