"""Segments of a spool: files of frames, and who reads them.

A frame is the length of its payload and the payload's CRC-32, both of 4 bytes, little endian, and the payload, a
`spool_pb2.Frame`, which begins with its record's id. A damaged frame is passed over, with a warning, and counted as
one: the next is found by its length, or, where the length is what is damaged, by looking for whole frames. A torn frame
at the end, at which a crash left off, is given up with a warning alone.
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
# What every payload begins with: the tag and the length of the record's id.
PAYLOAD_START = b"\n\x10"
# Looking for a whole frame, so many bytes are checked at most: of what a caller sent anything may look like frames.
_MAX_CHECKED_BYTES = 256 << 20


class Segment(NamedTuple):
    """A file of frames: the number of the first, and the bytes that are whole."""

    first: int
    size: int


class Segments(Protocol):
    """What a reader needs of a spool."""

    @property
    def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        ...

    def path(self, segment: Segment) -> Path:
        """Where a segment lies."""
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
        """Some of the frames that come next, numbered; none where it has caught up with the writer."""
        while self._find_segment():
            payloads = self._read_segment()
            if payloads:
                frames = list(enumerate(payloads, self.number))
                self.number += len(payloads)
                return frames
        return []

    def _find_segment(self) -> bool:
        """Turns to the segment that the next frame lies in, if there is one yet."""
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
                self._pass_over(self._read_ahead())
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._spool.path(self._segment), error.strerror)
            self._offset = self._segment.size
            self._damaged()
            return []
        return payloads

    def _pass_over(self, ahead: bytes) -> None:
        """Turns to what follows a damaged frame."""
        path, offset = self._spool.path(self._segment), self._offset
        following = _next_whole(ahead)
        if following is None and self._is_torn(ahead):
            logger.warning("%s is damaged at byte %d: its end, %d bytes, is torn", path, offset, len(ahead))
        else:
            lost = len(ahead) if following is None else following
            logger.warning("%s is damaged at byte %d: %d bytes are given up", path, offset, lost)
            self._damaged()
        self._offset += len(ahead) if following is None else following
        self.number += 1  # Of the frame that is lost: most often it is one.

    def _is_torn(self, ahead: bytes) -> bool:
        """Whether the spool ends within the frame that lies ahead."""
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
        """What lies ahead, at least the next frame."""
        ahead = self._segment.size - self._offset
        file = os.open(self._spool.path(self._segment), os.O_RDONLY)
        try:
            data = os.pread(file, min(_READ_BYTES, ahead), self._offset)
            needed = _HEADER.size + _HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else 0
            return os.pread(file, needed, self._offset) if len(data) < needed <= ahead else data
        finally:
            os.close(file)


def header(payload: bytes) -> bytes:
    """What stands before a payload."""
    return _HEADER.pack(len(payload), zlib.crc32(payload))


def _next_whole(data: bytes) -> int | None:
    """Where a whole frame begins behind the damaged one at the front, or the data ends; None where neither is found."""
    view = memoryview(data)
    if len(data) >= _HEADER.size:
        # First by its length: in its payload there may be what only looks like a frame.
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
    """The length of the payload of the whole frame at a place; 0 where there is none."""
    if len(data) - at < _HEADER.size:
        return 0
    length, checksum = _HEADER.unpack_from(data, at)
    payload = data[at + _HEADER.size : at + _HEADER.size + length]
    return length if 0 < length == len(payload) and zlib.crc32(payload) == checksum else 0


def _split(data: bytes) -> tuple[list[bytes], int]:
    """The payloads of the whole frames at the front, and what they take; no payload is empty, as zeros would be."""
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
