"""Tensors in the bodies of V2 REST's infer: described in JSON, with data inside it or as binary data behind it.

The header `inference-header-content-length` is the size of the JSON. The contents of the tensors with the parameter
`binary_data_size` follow in order, as in memory; a BYTES element is a 4-byte length and its bytes. A request's inputs
and an answer's outputs have this form.

Raises InvalidRequestError. Source: the protocol's "Tensor Data" section and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import InvalidRequestError
from headrace.oip.json_tensors import tensor_of
from headrace.oip.tensors import BYTES, checked_shape, dtype_of
from headrace.oip.wire_fields import field_head
from headrace.rpc.byte_budget import MAX_MESSAGE_BYTES

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE, BINARY, BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
MAX_TENSORS = 1024
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 65536  # The rest of the message is smaller.

Parameters = dict[str, Any] | None
Contents = Sequence[bytes | memoryview]  # Of one tensor, in parts.
BodyT = TypeVar("BodyT", bound=BaseModel)


class NamedTensor(BaseModel):
    """What every tensor of a body has."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    parameters: Parameters = None

    def parameter(self, name: str) -> Any:
        return (self.parameters or {}).get(name)


class BodyTensor(NamedTensor):
    """A tensor with its data, unless that follows the JSON."""

    datatype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(max_length=32)
    data: Any = None


def validated(body: type[BodyT], values: dict[str, Any]) -> BodyT:
    """A body's JSON object by its model."""
    try:
        return body.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def split_body(data: bytes, header_length: int | None) -> tuple[memoryview, memoryview]:
    """A body's JSON, and the binary data behind it; None: all of it is JSON."""
    view = memoryview(data)
    if header_length is None:
        header_length = len(view)
    if header_length > len(view):
        raise InvalidRequestError(f"{HEADER_LENGTH} is {header_length}, the body has {len(view)} bytes")
    return view[:header_length], view[header_length:]


def add_tensors(
    described: Any, tensors: Iterable[BodyTensor], binary: memoryview, kind: str, *, halves: bool = False
) -> list[Contents]:
    """Describes a body's tensors in a message's repeated field; their raw contents. `kind` is "input" or "output"."""
    names: set[str] = set()
    contents: list[Contents] = []
    at = 0
    for entry in tensors:
        if entry.name in names:
            raise InvalidRequestError(f"{kind} {entry.name!r} is given twice")
        names.add(entry.name)
        size = entry.parameter(BINARY_SIZE)
        if size is None:
            if entry.data is None:
                raise InvalidRequestError(f"{kind} {entry.name!r} has neither data nor {BINARY_SIZE}")
            tensor = tensor_of(entry.name, entry.datatype, entry.shape, entry.data, halves=halves)
            shape: tuple[int, ...] = tensor.shape
            contents.append((tensor.data,))
        else:
            shape = _binary_shape(entry, size, len(binary) - at, kind)
            contents.append((binary[at : at + size],))
            at += size
        described.add(name=entry.name, datatype=entry.datatype, shape=shape)
    if at != len(binary):
        raise InvalidRequestError(f"the {kind}s take {at} bytes of binary data, the body has {len(binary)}")
    return contents


def serialized(message: Message, raw_field: int, contents: Iterable[Contents]) -> bytes:
    """The message with the raw contents of its tensors, which are copied once; `raw_field` is their field's number."""
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for tensor in contents:
        parts += [field_head(raw_field, sum(map(len, tensor))), *tensor]
    return b"".join(parts)


def _binary_shape(entry: BodyTensor, size: Any, left: int, kind: str) -> tuple[int, ...]:
    """The shape of a tensor of `size` bytes of binary data, of which so many are left."""
    if type(size) is not int or size < 0:
        raise InvalidRequestError(f"{kind} {entry.name!r}: {BINARY_SIZE} must be a whole number")
    if entry.data is not None:
        raise InvalidRequestError(f"{kind} {entry.name!r} has both data and {BINARY_SIZE}")
    if size > left:
        raise InvalidRequestError(f"{kind} {entry.name!r}: {BINARY_SIZE} is {size}, the body has {left} bytes left")
    dtype, shape = dtype_of(entry.name, entry.datatype), checked_shape(entry.name, entry.shape)
    if entry.datatype != BYTES and size != (needed := math.prod(shape) * dtype.itemsize):
        raise InvalidRequestError(
            f"{kind} {entry.name!r}: {entry.datatype} of shape {list(shape)} is {needed} bytes, {BINARY_SIZE} is {size}"
        )
    return shape
