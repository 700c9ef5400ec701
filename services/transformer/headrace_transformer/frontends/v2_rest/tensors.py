"""Tensors in bodies: described in JSON, with data inside it or as binary data behind it, to raw contents, and back.

The header `inference-header-content-length` is the size of the JSON. The contents of the tensors with the parameter
`binary_data_size` follow in order, as in memory; a BYTES element is a 4-byte length and its bytes.

Data in JSON may be nested like the shape or flat; a tensor of one element may be the element itself. Integers must fit
their datatype, BOOL takes only `true` and `false`, BYTES takes strings, kept as UTF-8. FP32 and FP64 take any number,
`NaN` and the infinities, but no finite number that overflows. FP16 and BF16 have no JSON form in the protocol. Sizes
are compared before memory is allocated.

Raises InvalidRequestError. Large tensors are worked on a slice at a time, see json_text.
Source: the protocol's "Tensor Data" section, Triton's binary tensor data extension and its http_server.cc.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import InvalidRequestError
from headrace.oip.json_text import SLICE, dump_array, load_object
from headrace.oip.raw_contents import joined
from headrace.oip.tensors import BF16, BYTES, Array, RawTensor, checked_shape, decode_raw, dtype_of
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.openai.errors import fault_of
from headrace_transformer.predictors.oip.oip_call import predictor_answers

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE, BINARY, BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 65536  # The rest of the message is smaller.
_MAX_TENSORS = 1024

_Parameters = dict[str, Any] | None
_LENGTH = struct.Struct("<I")
_BINARY_ONLY = ("FP16", BF16)
_MAX_DIMENSIONS = 32
_SCALARS = {
    "b": (frozenset({bool}), "true or false"),
    "i": (frozenset({int}), "whole numbers"),
    "u": (frozenset({int}), "whole numbers"),
    "f": (frozenset({int, float}), "numbers"),
    "O": (frozenset({str}), "strings"),
}


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


def serialized(request: pb.ModelInferRequest, inputs: Mapping[str, RawTensor]) -> bytes:
    """The serialized request, which has no inputs of its own, with these."""
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
    return joined(request, [tensor.data for tensor in inputs.values()])


def read_inputs(tensors: Iterable[BodyTensor], binary: memoryview) -> dict[str, RawTensor]:
    """A body's inputs, by name."""
    inputs: dict[str, RawTensor] = {}
    at = 0
    for entry in tensors:
        if entry.name in inputs:
            raise InvalidRequestError(f"input {entry.name!r} is given twice")
        size = entry.parameter(BINARY_SIZE)
        if size is not None:
            inputs[entry.name] = _binary_tensor(entry, size, binary[at:])
            at += size
        elif entry.data is None:
            raise InvalidRequestError(f"input {entry.name!r} has neither data nor {BINARY_SIZE}")
        else:
            inputs[entry.name] = tensor_of(entry.name, entry.datatype, entry.shape, entry.data)
    if at != len(binary):
        raise InvalidRequestError(f"the inputs take {at} bytes of binary data, the body has {len(binary)}")
    return inputs


def _binary_tensor(entry: BodyTensor, size: Any, left: memoryview) -> RawTensor:
    """The tensor of the first `size` bytes of the binary data that is left."""
    if type(size) is not int or size < 0:
        raise InvalidRequestError(f"input {entry.name!r}: {BINARY_SIZE} must be a whole number")
    if entry.data is not None:
        raise InvalidRequestError(f"input {entry.name!r} has both data and {BINARY_SIZE}")
    if size > len(left):
        raise InvalidRequestError(f"input {entry.name!r}: {BINARY_SIZE} is {size}, the body has {len(left)} bytes left")
    dtype, shape = dtype_of(entry.name, entry.datatype), checked_shape(entry.name, entry.shape)
    if entry.datatype != BYTES and size != (needed := math.prod(shape) * dtype.itemsize):
        raise InvalidRequestError(
            f"input {entry.name!r}: {entry.datatype} of shape {list(shape)} is {needed} bytes, {BINARY_SIZE} is {size}"
        )
    return RawTensor(entry.datatype, shape, left[:size])


def tensor_of(name: str, datatype: str, shape: Sequence[int], data: Any) -> RawTensor:
    """The tensor that a body's JSON holds."""
    dtype, checked = dtype_of(name, datatype), checked_shape(name, shape)
    if datatype in _BINARY_ONLY:
        raise InvalidRequestError(f"tensor {name!r}: {datatype} has no JSON form; send it as binary data")
    flat, _ = flattened(name, data)
    if len(flat) != math.prod(checked):
        raise InvalidRequestError(
            f"tensor {name!r}: shape {list(checked)} holds {math.prod(checked)} elements, got {len(flat)}"
        )
    return RawTensor(datatype, checked, _raw(name, datatype, dtype, flat))


def fitted_shape(name: str, declared: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of `count` elements for an input of a model; raises InvalidRequestError.

    Of the variable sizes (-1) the innermost takes the rest, the others are 1, as in Triton.
    """
    shape = list(declared)
    is_open = [index for index, size in enumerate(shape) if size < 0]
    if is_open:
        fixed = math.prod(size for size in shape if size >= 0)
        for index in is_open:
            shape[index] = 1
        shape[is_open[-1]] = count // fixed if fixed else 0
    if math.prod(shape) != count:
        raise InvalidRequestError(f"input {name!r}: {count} elements do not fill the shape {list(declared)}")
    return tuple(shape)


def flattened(name: str, data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The elements of nested lists, row by row, and the lists' shape, which is () for a single element."""
    if not isinstance(data, list):
        return [data], ()
    level, shape = data, [len(data)]
    while level and isinstance(level[0], list):
        if set(map(type, level)) != {list} or len(set(map(len, level))) != 1:
            raise InvalidRequestError(f"tensor {name!r}: the lists of data differ in length or in depth")
        if len(shape) == _MAX_DIMENSIONS:
            raise InvalidRequestError(f"tensor {name!r}: data is nested more than {_MAX_DIMENSIONS} deep")
        shape.append(len(level[0]))
        level = list(chain.from_iterable(level))
    return level, tuple(shape)


def _raw(name: str, datatype: str, dtype: np.dtype[Any], flat: list[Any]) -> bytes:
    parts = []
    allowed, wanted = _SCALARS[dtype.kind]
    for start in range(0, len(flat), SLICE):
        part = flat[start : start + SLICE]
        if not allowed.issuperset(map(type, part)):
            raise InvalidRequestError(f"tensor {name!r}: {datatype} takes {wanted}")
        try:
            if datatype == BYTES:
                texts = (text.encode() for text in part)
                parts.append(b"".join(_LENGTH.pack(len(text)) + text for text in texts))
            else:
                parts.append(_array(part, dtype).tobytes())
        except OverflowError:
            raise InvalidRequestError(f"tensor {name!r}: a value does not fit {datatype}") from None
        except UnicodeEncodeError:
            raise InvalidRequestError(f"tensor {name!r}: a string is not UTF-8") from None
    return b"".join(parts)


def _array(part: list[Any], dtype: np.dtype[Any]) -> Array:
    if dtype.kind != "f":
        return np.array(part, dtype)
    wide = np.array(part, np.float64)
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    if not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise OverflowError
    return array


def json_of(name: str, tensor: RawTensor) -> bytes:
    """An output's data as a flat JSON array; HopBrokenError where the contents do not fit the tensor."""
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidRequestError(f"output {name!r} is {tensor.datatype}, which has no JSON form; ask for binary_data")
    with predictor_answers():
        array = decode_raw(name, tensor)
    if tensor.datatype != BYTES:
        return dump_array(array)
    try:
        return orjson.dumps([item.decode() for item in array.ravel()])
    except UnicodeDecodeError:
        raise InvalidRequestError(f"output {name!r} is not UTF-8; ask for binary_data") from None
