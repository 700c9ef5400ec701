"""The journal of a spool: begins of records that the writer thread has yet to append to a segment.

An answer waits until its begin is on disk. Waiting for the writer thread costs two switches of threads for each answer,
several times as much as the write. So the event loop puts the begin here, into a file that is mapped to memory: that is
a copy of some hundred bytes, and the kernel keeps them if the process dies. The next process reads them after the
spool's segments (payload/shipper.py). A journal is not for contents that must survive a power failure.

The file has slots of equal size, all allocated when it is created: a full disk cannot break the mapping. A slot is the
length of a frame, of 4 bytes, little endian, and the frame; a free slot has the length zero. The length is written
after the frame, so a slot that is used is whole.

`put` is for the event loop's thread, `free` for any.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_SLOT_BYTES = 8 << 10
_SLOTS = 256
# While the writer thread frees nothing for this long, the disk does not answer, and even a mapped page may have to wait
# for it. The writer takes 60 ms at most.
_STALLED_S = 0.25

MAX_FRAME_BYTES = _SLOT_BYTES - _LENGTH.size


class Journal:
    """A new file at `path`; raises OSError if it cannot be created, or the disk has no room for it."""

    def __init__(self, path: Path) -> None:
        self._free = list(range(_SLOTS))  # The last one is used first: few pages are touched.
        self._used: dict[bytes, int] = {}  # Slots by record.
        self._freed_at = 0.0
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, _SLOTS * _SLOT_BYTES)
            self._mapped = mmap.mmap(file, _SLOTS * _SLOT_BYTES)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)

    def put(self, record_id: bytes, frame: bytes) -> bool:
        """Keeps the frame until `free`; returns whether there was a slot that is large enough."""
        size = len(frame)
        if size > MAX_FRAME_BYTES or not self._free:
            return False
        now = time.monotonic()
        if not self._used:
            self._freed_at = now
        elif now - self._freed_at > _STALLED_S:
            return False
        slot = self._free.pop()
        at = slot * _SLOT_BYTES
        self._mapped[at + _LENGTH.size : at + _LENGTH.size + size] = frame
        self._mapped[at : at + _LENGTH.size] = _LENGTH.pack(size)
        self._used[record_id] = slot
        return True

    def free(self, record_id: bytes) -> None:
        """Overwrites the frame of a record with zeros, if it has one here."""
        slot = self._used.pop(record_id, None)
        if slot is not None:
            at = slot * _SLOT_BYTES
            (size,) = _LENGTH.unpack_from(self._mapped, at)
            self._mapped[at : at + _LENGTH.size] = _LENGTH.pack(0)
            self._mapped[at + _LENGTH.size : at + _LENGTH.size + size] = bytes(size)
            self._free.append(slot)
            self._freed_at = time.monotonic()


def read_journal(path: Path) -> list[bytes]:
    """The frames in a file, always in the same order; none if there is no file, or it cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error.strerror)
        return []
    frames = []
    for at in range(0, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES):
        (size,) = _LENGTH.unpack_from(data, at)
        if 0 < size <= MAX_FRAME_BYTES:
            frames.append(data[at + _LENGTH.size : at + _LENGTH.size + size])
    return frames
