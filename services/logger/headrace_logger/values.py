"""A payload record as plain values: the common names and types of the JSON and Parquet exports and of events.

Names are those of the message's fields, except that the usage has columns of its own, and that of a stream's fields
none is here. Times are datetimes in UTC with whole microseconds; unknown values are None; a tensor's contents are
bytes; floats may be NaN or infinite. `to_json` encodes them as JSON: times as RFC 3339, contents in base64, NaN and
infinities as null.
"""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace_protos.headrace_pb2 import PayloadRecord

_OF_STREAMS = ("page_token", "error")

# Of a message: the value of a column.
_Value = Callable[[Any], Any]


def row(record: Message) -> dict[str, Any]:
    """Every column by name."""
    return {name: value(record) for name, value in _values_of(record.DESCRIPTOR)}


def columns_of(descriptor: Descriptor) -> list[FieldDescriptor]:
    """The fields that are columns, in order, those of the usage among them."""
    columns: list[FieldDescriptor] = []
    for field in descriptor.fields:
        if field.name == "usage" and field.message_type is not None:
            columns += columns_of(field.message_type)
        elif field.name not in _OF_STREAMS:
            columns.append(field)
    return columns


def is_time(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp"


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def time_of(record: PayloadRecord) -> datetime | None:
    """The time of the request's arrival; None if it is outside of datetime's range."""
    try:
        return record.time.ToDatetime(tzinfo=UTC)
    except (OverflowError, ValueError):
        return None


def to_json(values: Any) -> bytes:
    """Encodes the values as one line of JSON, without the line break."""
    return orjson.dumps(values, default=_base64, option=orjson.OPT_UTC_Z)


@lru_cache
def _values_of(descriptor: Descriptor) -> tuple[tuple[str, _Value], ...]:
    return tuple((field.name, _value_of(field, descriptor)) for field in columns_of(descriptor))


def _value_of(field: FieldDescriptor, descriptor: Descriptor) -> _Value:
    name = field.name
    if field.containing_type is not descriptor:
        return lambda message: getattr(message.usage, name) if message.HasField("usage") else None
    if is_time(field):
        return time_of
    if is_map(field):
        return lambda message: dict(getattr(message, name))
    if field.is_repeated:
        if field.message_type is None:
            return lambda message: list(getattr(message, name))
        return lambda message: [row(one) for one in getattr(message, name)]
    if field.message_type is not None:
        return lambda message: row(getattr(message, name)) if message.HasField(name) else None
    if field.has_presence:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return lambda message: getattr(message, name)


def _base64(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON")
