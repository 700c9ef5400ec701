"""The length-delimited fields of a serialized protobuf message: no copy, no parsing, and the head of a new one.

Fields of the other types, which none of the messages here has by itself, are skipped like unknown fields. Invalid data
raise protobuf's DecodeError, as the generated parsers do.
Source of the format: protobuf's wire encoding.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from headrace.rpc.limits.wire_limits import END_GROUP, FIXED32, FIXED64, LENGTH_DELIMITED, START_GROUP, VARINT, varint

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_MAX_DEPTH = 100  # Of groups in groups, as in the generated parsers.


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Each field of a message: its number, where it starts, where its contents start, and where they end."""
    at, size = 0, len(data)
    while at < size:
        start = at
        # Numbers of one byte without a call: almost all are.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            if at < size and data[at] < 0x80 and data[at] < size - at:
                contents = at + 1
                at = contents + data[at]
            else:
                contents, at = _contents(data, at)
            if not tag >> 3:
                raise DecodeError("a field has no number")
            yield tag >> 3, start, contents, at
        else:
            at = _end_of(data, tag, at)


def field_head(number: int, size: int) -> bytes:
    """The tag and length before the contents of a length-delimited field."""
    return _as_varint(number << 3 | LENGTH_DELIMITED) + _as_varint(size)


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _end_of(data: bytes | memoryview, tag: int, at: int) -> int:
    """Where a field ends whose contents begin at a position, a group with all that is in it."""
    groups: list[int] = []
    while True:
        number, kind = tag >> 3, tag & 7
        if not number:
            raise DecodeError("a field has no number")
        if kind == START_GROUP:
            if len(groups) == _MAX_DEPTH:
                raise DecodeError("too many groups in groups")
            groups.append(number)
        elif kind == END_GROUP:
            if not groups or groups.pop() != number:
                raise DecodeError("a group ends that has not begun")
        elif kind == LENGTH_DELIMITED:
            _, at = _contents(data, at)
        elif kind == VARINT:
            _, at = varint(data, at)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            if at > len(data):
                raise DecodeError("a field ends beyond the message")
        else:
            raise DecodeError("a field has no type")
        if not groups:
            return at
        tag, at = varint(data, at)


def _contents(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Where the contents of a length-delimited field begin and end whose length is at a position."""
    length, at = varint(data, at)
    if length > len(data) - at:
        raise DecodeError("a field ends beyond the message")
    return at, at + length
