"""The fields of a serialized protobuf message, of which every one is length-delimited: no copy, no parsing.

What cannot be read raises protobuf's DecodeError, as the generated parsers do.
Source of the format: protobuf's wire encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

_LENGTH_DELIMITED = 2
_MAX_VARINT_BYTES = 10


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Each field of a message: its number, where it starts, where its contents start, and where they end."""
    at, size = 0, len(data)
    while at < size:
        start = at
        tag, at = _varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            raise DecodeError("a field is not length-delimited")
        length, at = _varint(data, at)
        if length > size - at:
            raise DecodeError("a field ends beyond the message")
        yield tag >> 3, start, at, at + length
        at += length


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number is cut off")
