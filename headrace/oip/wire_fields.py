"""The length-delimited fields of a serialized protobuf message: no copy, no parsing, and the head of a new one.

Numbers, which none of the messages here has by itself, are skipped like unknown fields. Data that are invalid, or that
have a group, raise protobuf's DecodeError: what they are is for the generated parsers to say.
Source of the format: protobuf's wire encoding.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from headrace.rpc.limits.wire_limits import FIXED32, FIXED64, LENGTH_DELIMITED, VARINT, varint

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Each field of a message: its number, where it starts, where its contents start, and where they end."""
    at, size = 0, len(data)
    while at < size:
        start = at
        # Numbers of one byte without a call: almost all are.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            length, contents = (data[at], at + 1) if at < size and data[at] < 0x80 else varint(data, at)
            at = contents + length
        elif kind == VARINT:
            _, at = varint(data, at)
        else:
            at += _FIXED_BYTES.get(kind, size)
        if at > size or not tag >> 3:
            raise DecodeError("a field has no number, or ends beyond the message")
        if kind == LENGTH_DELIMITED:
            yield tag >> 3, start, contents, at


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
