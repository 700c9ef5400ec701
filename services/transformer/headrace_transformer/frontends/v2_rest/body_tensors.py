"""Tensors in the bodies of V2 REST's infer: described in JSON, with data inside it or as binary data behind it.

The header `inference-header-content-length` is the size of the JSON. The contents of the tensors with the parameter
`binary_data_size` follow in order, as in memory; a BYTES element is a 4-byte length and its bytes.

Raises InvalidRequestError. Source: the protocol's "Tensor Data" section and Triton's binary tensor data extension.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import InvalidRequestError
from headrace.oip.json_text import load_object
from headrace.oip.raw_contents import Contents
from headrace.oip.tensors import BYTES, checked_shape, dtype_of
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.openai.errors import fault_of
from headrace_transformer.frontends.v2_rest.json_tensors import tensor_of

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE, BINARY, BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 65536  # The rest of the message is smaller.
_MAX_TENSORS = 1024

_Parameters = dict[str, Any] | None


class NamedTensor(BaseModel):
    """What every tensor of a body has."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    parameters: _Parameters = None

    def parameter(self, name: str) -> Any:
        return (self.parameters or {}).get(name)


class BodyTensor(NamedTensor):
    """A tensor with its data, unless that follows the JSON."""

    datatype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(max_length=32)
    data: Any = None


class Body(BaseModel):
    """The JSON of a request."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    inputs: list[BodyTensor] = Field(max_length=_MAX_TENSORS)
    outputs: list[NamedTensor] | None = Field(None, max_length=_MAX_TENSORS)
    parameters: _Parameters = None


def split_body(data: bytes, header_length: int | None) -> tuple[Body, memoryview]:
    """A request's JSON, and the binary data behind it; None: all of it is JSON."""
    view = memoryview(data)
    if header_length is None:
        header_length = len(view)
    if header_length > len(view):
        raise InvalidRequestError(f"{HEADER_LENGTH} is {header_length}, the body has {len(view)} bytes")
    values = load_object(view[:header_length])
    try:
        return Body.model_validate(values), view[header_length:]
    except ValidationError as error:
        raise InvalidRequestError(": ".join(fault_of(error))) from None


def add_inputs(request: pb.ModelInferRequest, tensors: Iterable[BodyTensor], binary: memoryview) -> list[Contents]:
    """Describes a body's inputs in a request, and returns their raw contents."""
    names: set[str] = set()
    contents: list[Contents] = []
    at = 0
    for entry in tensors:
        if entry.name in names:
            raise InvalidRequestError(f"input {entry.name!r} is given twice")
        names.add(entry.name)
        size = entry.parameter(BINARY_SIZE)
        if size is None:
            if entry.data is None:
                raise InvalidRequestError(f"input {entry.name!r} has neither data nor {BINARY_SIZE}")
            tensor = tensor_of(entry.name, entry.datatype, entry.shape, entry.data)
            shape: tuple[int, ...] = tensor.shape
            contents.append(tensor.data)
        else:
            shape = _binary_shape(entry, size, len(binary) - at)
            contents.append(binary[at : at + size])
            at += size
        request.inputs.add(name=entry.name, datatype=entry.datatype, shape=shape)
    if at != len(binary):
        raise InvalidRequestError(f"the inputs take {at} bytes of binary data, the body has {len(binary)}")
    return contents


def _binary_shape(entry: BodyTensor, size: Any, left: int) -> tuple[int, ...]:
    """The shape of a tensor of `size` bytes of binary data, of which so many are left."""
    if type(size) is not int or size < 0:
        raise InvalidRequestError(f"input {entry.name!r}: {BINARY_SIZE} must be a whole number")
    if entry.data is not None:
        raise InvalidRequestError(f"input {entry.name!r} has both data and {BINARY_SIZE}")
    if size > left:
        raise InvalidRequestError(f"input {entry.name!r}: {BINARY_SIZE} is {size}, the body has {left} bytes left")
    dtype, shape = dtype_of(entry.name, entry.datatype), checked_shape(entry.name, entry.shape)
    if entry.datatype != BYTES and size != (needed := math.prod(shape) * dtype.itemsize):
        raise InvalidRequestError(
            f"input {entry.name!r}: {entry.datatype} of shape {list(shape)} is {needed} bytes, {BINARY_SIZE} is {size}"
        )
    return shape
