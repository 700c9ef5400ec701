"""Segments of a spool, which are files of frames, and their reader.

A frame is the length of its payload and the payload's CRC-32, both of 4 bytes, little endian, and the payload, a
`spool_pb2.Frame`, which begins with its record's id. A damaged frame is skipped with a warning, and counted as one
frame. The next frame is found by the damaged one's length or, if the length itself is damaged, by a search for a whole
frame. A torn frame at the end, where a crash interrupted a write, is discarded with a warning and not counted.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_READ_BYTES = 256 << 10
# The start of every payload: the tag and the length of the record's id.
PAYLOAD_START = b"\n\x10"
# The most bytes that a search for a whole frame checks: contents that a caller sent may look like any number of frames.
_MAX_CHECKED_BYTES = 256 << 20


class Segment(NamedTuple):
    """A file of frames: the number of the first frame, and the size of the whole frames."""

    first: int
    size: int


class Segments(Protocol):
    """The part of a spool that a reader uses."""

    @property
    def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        ...

    def path(self, segment: Segment) -> Path:
        """The file of a segment."""
        ...


class SpoolReader:
    """Reads a spool's frames in order; belongs to one thread. `damaged` is called for each frame that is lost."""

    def __init__(self, spool: Segments, damaged: Callable[[], None] = lambda: None) -> None:
        self.number = 1  # Of the next frame.
        self._spool = spool
        self._damaged = damaged
        self._segment = Segment(0, 0)
        self._offset = 0

    def read(self) -> list[tuple[int, bytes]]:
        """Some of the next frames, with their numbers; none once the reader has caught up with the writer."""
        while self._find_segment():
            payloads = self._read_segment()
            if payloads:
                frames = list(enumerate(payloads, self.number))
                self.number += len(payloads)
                return frames
        return []

    def _find_segment(self) -> bool:
        """Moves to the segment of the next frame, if the frame is written."""
        for segment in self._spool.segments:
            if segment.first == self._segment.first and segment.size > self._offset:
                self._segment = segment
                return True
            if segment.first > self._segment.first and segment.size:
                self._segment, self._offset, self.number = segment, 0, segment.first
                return True
        return False

    def _read_segment(self) -> list[bytes]:
        try:
            payloads, size = _split(self._read_some())
            if payloads:
                self._offset += size
            else:
                self._skip(self._read_ahead())
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._spool.path(self._segment), error.strerror)
            self._offset = self._segment.size
            self._damaged()
            return []
        return payloads

    def _skip(self, ahead: bytes) -> None:
        """Moves behind a damaged frame."""
        path, offset = self._spool.path(self._segment), self._offset
        following = _next_whole(ahead)
        if following is None and self._is_torn(ahead):
            logger.warning("%s is damaged at byte %d: its end, %d bytes, is torn", path, offset, len(ahead))
        else:
            lost = len(ahead) if following is None else following
            logger.warning("%s is damaged at byte %d: %d bytes are discarded", path, offset, lost)
            self._damaged()
        self._offset += len(ahead) if following is None else following
        self.number += 1  # Assumes that one frame is lost, which is the usual case.

    def _is_torn(self, ahead: bytes) -> bool:
        """Whether the spool ends within the next frame."""
        is_last = self._spool.segments[-1].first == self._segment.first
        if not is_last or len(ahead) < _HEADER.size:
            return is_last
        return _HEADER.size + _HEADER.unpack_from(ahead)[0] > len(ahead) or not any(ahead)

    def _read_ahead(self) -> bytes:
        file = os.open(self._spool.path(self._segment), os.O_RDONLY)
        try:
            return os.pread(file, self._segment.size - self._offset, self._offset)
        finally:
            os.close(file)

    def _read_some(self) -> bytes:
        """The next bytes, at least the whole next frame."""
        ahead = self._segment.size - self._offset
        file = os.open(self._spool.path(self._segment), os.O_RDONLY)
        try:
            data = os.pread(file, min(_READ_BYTES, ahead), self._offset)
            needed = _HEADER.size + _HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else 0
            return os.pread(file, needed, self._offset) if len(data) < needed <= ahead else data
        finally:
            os.close(file)


def header(payload: bytes) -> bytes:
    """The header of a payload's frame."""
    return _HEADER.pack(len(payload), zlib.crc32(payload))


def _next_whole(data: bytes) -> int | None:
    """The offset of the first whole frame after the damaged one at the front; None if there is none.

    It is the end of the data if the damaged frame's length leads there.
    """
    view = memoryview(data)
    if len(data) >= _HEADER.size:
        # First by its length: its payload may hold bytes that only look like a frame.
        end: int = _HEADER.size + _HEADER.unpack_from(data)[0]
        if end > _HEADER.size and (end == len(data) or _whole_length(view, end)):
            return end
    checked = 0
    payload_at = data.find(PAYLOAD_START, _HEADER.size + 1)
    while payload_at != -1 and checked < _MAX_CHECKED_BYTES:
        at = payload_at - _HEADER.size
        length, _ = _HEADER.unpack_from(data, at)
        if payload_at + length <= len(data):
            checked += length
            if _whole_length(view, at):
                return at
        payload_at = data.find(PAYLOAD_START, payload_at + 1)
    return None


def _whole_length(data: memoryview, at: int) -> int:
    """The length of the payload of the whole frame at an offset; 0 if there is none."""
    if len(data) - at < _HEADER.size:
        return 0
    length, checksum = _HEADER.unpack_from(data, at)
    payload = data[at + _HEADER.size : at + _HEADER.size + length]
    return length if 0 < length == len(payload) and zlib.crc32(payload) == checksum else 0


def _split(data: bytes) -> tuple[list[bytes], int]:
    """The payloads of the whole frames at the front, and the size of the frames.

    An empty payload is damage: zeros would look like one.
    """
    payloads: list[bytes] = []
    at = 0
    while len(data) - at >= _HEADER.size:
        length, checksum = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if not 0 < length == len(payload) or zlib.crc32(payload) != checksum:
            break
        payloads.append(payload)
        at += _HEADER.size + length
    return payloads, at
