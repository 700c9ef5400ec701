"""The wire format of a protobuf message, read without parsing: its fields, and bounds on what a parser makes of it.

A parser makes up to a hundred bytes of two: an element of a repeated message, or a number of one byte that becomes one
of eight. It also holds the interpreter until it is done. So a large message is walked first, without parsing: every
field of a message that its descriptor knows counts, at any depth, and the bytes of packed numbers of variable length.

A walk can be interrupted and continued. What cannot be read ends it without an error: the parser reports that.

`fields` gives the length-delimited fields, without a copy. Numbers, which none of the messages there has by itself, are
skipped like unknown fields. Data that are invalid, or that have a group, raise protobuf's DecodeError: what they are is
for the generated parsers to say.
Source of the format: protobuf's wire encoding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError

MAX_FIELDS = 65_536
MAX_PACKED_BYTES = 2 * 1024 * 1024  # Parsed in some 10 ms, in which nothing else runs.
FIELD_BYTES = 256  # Memory of a parsed field at most, besides its contents.
NUMBER_BYTES = 8  # Memory of a number that takes one byte on the wire.

_VARINTS = frozenset(
    {
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
    }
)
VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)  # Wire types.
_MAX_VARINT_BYTES = 10


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it; raises DecodeError."""
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


@dataclass(frozen=True)
class Schema:
    """What of a message is walked into: its fields that are messages, by number, and those of packed numbers."""

    messages: "Mapping[int, Schema]"
    packed: frozenset[int]


@cache
def schema_of(descriptor: Descriptor) -> Schema:
    """The schema of a message and, once each, of the messages in it; a message may contain itself."""
    return _schema_of(descriptor, {})


def _schema_of(descriptor: Descriptor, known: dict[str, Schema]) -> Schema:
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    messages: dict[int, Schema] = {}
    packed = frozenset(field.number for field in descriptor.fields if field.is_repeated and field.type in _VARINTS)
    schema = known[descriptor.full_name] = Schema(messages, packed)
    for field in descriptor.fields:
        if field.message_type is not None:
            messages[field.number] = _schema_of(field.message_type, known)
    return schema


class Walk:
    """Counts what a message holds; raises InvalidRequestError as soon as that is too much."""

    def __init__(self, data: bytes, schema: Schema) -> None:
        self._data = data
        self._at = 0
        self._ended = False
        self._inside: list[tuple[int, Schema]] = [(len(data), schema)]  # Where each message ends that is walked in.
        self.fields = 0
        self.packed_bytes = 0

    @property
    def memory(self) -> int:
        """Bytes that the parsed message takes at most, besides those of the message itself."""
        return self.fields * FIELD_BYTES + self.packed_bytes * NUMBER_BYTES

    def proceed(self, max_fields: int) -> bool:
        """Walks over so many fields at most; whether the walk is at its end."""
        if not self._ended:
            try:
                self._ended = self._walk(max_fields)
            except (DecodeError, IndexError):
                self._ended = True
        return self._ended

    def _walk(self, max_fields: int) -> bool:
        data, at, inside = self._data, self._at, self._inside
        end, schema = inside[-1]
        for _ in range(max_fields):
            while at >= end:
                inside.pop()
                if not inside:
                    return True
                end, schema = inside[-1]
            self.fields += 1
            if self.fields > MAX_FIELDS:
                raise InvalidRequestError(
                    f"the request has more than {MAX_FIELDS} protobuf fields; send large tensors as raw contents"
                )
            # Numbers of one byte without a call: almost all are.
            tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                length, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
                if length > end - at:
                    return True
                number = tag >> 3
                inner = schema.messages.get(number)
                if inner is not None:
                    end, schema = at + length, inner
                    inside.append((end, schema))
                    continue
                if number in schema.packed:
                    self.packed_bytes += length
                    if self.packed_bytes > MAX_PACKED_BYTES:
                        raise InvalidRequestError(
                            f"the request has more than {MAX_PACKED_BYTES >> 20} MiB of packed integers; send large"
                            " tensors as raw contents"
                        )
                at += length
            elif kind == VARINT:
                _, at = varint(data, at)
            elif kind == FIXED64:
                at += 8
            elif kind == FIXED32:
                at += 4
            elif kind not in (START_GROUP, END_GROUP):
                return True
        self._at = at
        return False


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
