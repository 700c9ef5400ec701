"""The file of a model's packed weights: one engine writes it when it has packed them, later ones map it.

All processes that map a file share its memory. The file has no name until all of it is on the disk, so that nothing
half-written is left by a process that is killed. It begins with _HEADER: the mark, and the size of the whole.

Weights are read from huge pages: from small ones a virtual machine reads two thirds as much a second. A file has huge
pages on some file systems only (ext4 since Linux 6.16, XFS), so that elsewhere an engine copies it.
"""

import fcntl
import logging
import mmap
import os
import re
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
_WRITTEN_AT_ONCE = 1 << 26
_POPULATE_READ = 22  # Of madvise, since Linux 5.14; Python has no name for it.
_HUGE_SHARE = 0.75  # Of a mapped file; with less it is copied.
_UNUSED_S = 30 * 86400.0  # Until a file is deleted: another version of model or code has made it needless.


class PackedFile:
    """Memory for packed weights, in the order in which a decoder packs them.

    `is_packed`: the file was there, and has them. Else `keep` keeps what was packed, within the `most` bytes that the
    files of the folder may have. `size`: an estimate, not less than the packed weights. Without a path, where the disk
    has no room, or while another process packs, nothing is kept. `is_mapped`: the memory is that of the file.
    """

    def __init__(self, path: Path | None = None, size: int = 0, most: int = 0) -> None:
        self.is_packed = self.is_mapped = False
        self._end = _ALIGNMENT
        self._file = -1
        self._memory: Array | None = None
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

    def take(self, size: int) -> Array:
        """The next uint8 [size], aligned for vectors; raises StartupFault where the file does not fit the model."""
        begin = self._end
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return aligned(size)
        if self._end > len(self._memory):
            self._refuse()
        return self._memory[begin : begin + size]

    def keep(self) -> None:
        """Gives the file its name once all of it is on the disk: in a thread, because that takes seconds."""
        if self._memory is None:
            return
        if not self.is_packed:
            Thread(target=self._keep, args=(self._memory,), name="keep-weights", daemon=True).start()
        elif self._end != len(self._memory):
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
            for advice in (mmap.MADV_HUGEPAGE, _POPULATE_READ):
                with suppress(OSError):  # Older kernels.
                    memory.madvise(advice)
        finally:
            os.close(file)
        with suppress(OSError):  # The folder may be read-only.
            os.utime(self._path)
        self._memory, self.is_packed = np.frombuffer(memory, np.uint8), True
        self.is_mapped = _has_huge_pages(self._memory)
        if not self.is_mapped:
            mapped, self._memory = self._memory, aligned(size)
            self._memory[:] = mapped

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
            os.posix_fallocate(self._file, 0, size)
            self._memory = aligned(size)
            self._opened = opened.pop_all()

    def _keep(self, memory: Array) -> None:
        try:
            os.truncate(self._file, self._end)
            memory[: _HEADER.size] = np.frombuffer(_HEADER.pack(_MARK, self._end), np.uint8)
            for at in range(0, self._end, _WRITTEN_AT_ONCE):
                os.pwrite(self._file, memory.data[at : min(at + _WRITTEN_AT_ONCE, self._end)], at)
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


def _has_huge_pages(memory: Array) -> bool:
    """Whether most of a mapped file lies in huge pages."""
    with suppress(OSError):
        _, _, own = Path("/proc/self/smaps").read_text().partition(f"\n{memory.ctypes.data:08x}-")
        kilobytes = re.search(r"^FilePmdMapped: *(\d+) kB$", own, re.MULTILINE)
        return kilobytes is not None and int(kilobytes[1]) << 10 > _HUGE_SHARE * len(memory)
    return False


def aligned(size: int) -> Array:
    """Zeros [size], uint8, at an address for vectors; NumPy asks for huge pages."""
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]
