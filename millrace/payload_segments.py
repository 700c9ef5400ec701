"""Segments of a spool: files of frames, and who reads them.

A frame is the length of its payload and the payload's CRC-32, both of 4 bytes, little endian, and the payload,
which is not empty. Behind a damaged frame, such as the torn one at which a crash left off, the rest of its
segment is given up, and said in one warning.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_READ_BYTES = 256 << 10


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
    """Reads a spool's frames in order; belongs to one thread."""

    def __init__(self, spool: Segments) -> None:
        self.number = 1  # Of the next frame.
        self._spool = spool
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
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._spool.path(self._segment), error.strerror)
            payloads, size = [], 0
        if payloads:
            self._offset += size
        else:
            logger.warning(
                "%s is damaged at byte %d: the %d bytes behind are given up",
                *(self._spool.path(self._segment), self._offset, self._segment.size - self._offset),
            )
            self._offset = self._segment.size
        return payloads

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
