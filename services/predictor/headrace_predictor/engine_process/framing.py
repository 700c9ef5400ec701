"""Frames on a stream socket: each is a message after its length, four bytes, little-endian."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
MAX_FRAME_BYTES = 256 * 1024 * 1024  # A longer one is no frame.


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts the bytes of a stream into messages; raises ValueError for what is no frame."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that are complete with these bytes."""
        self._unread += data
        at = 0
        try:
            while len(self._unread) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread, at)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                begin, end = at + _LENGTH.size, at + _LENGTH.size + length
                if end > len(self._unread):
                    break
                at = end
                yield bytes(memoryview(self._unread)[begin:end])
        finally:
            del self._unread[:at]


def messages(connection: socket.socket) -> Iterator[bytes]:
    """The messages of a blocking socket until its other end closes."""
    frames = Frames()
    while data := connection.recv(_READ_BYTES):
        yield from frames.feed(data)
