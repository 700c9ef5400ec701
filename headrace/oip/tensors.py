"""Tensors of the Open Inference Protocol to numpy arrays and back.

Datatypes: BOOL, (U)INT8 to 64, FP16, FP32, FP64, BF16, BYTES. Raw contents are little-endian, row by row; a BYTES
element is a 4-byte length and its bytes. Typed contents exist for all datatypes except FP16 and BF16. Fixed-size raw
tensors are decoded without a copy, as read-only views. BF16 is kept as its bits in uint16, BYTES as arrays of `bytes`.

Raises InvalidRequestError if name, datatype, shape and size do not match, and above MAX_BYTES_ELEMENTS.
Source: the protocol's "Tensor Data" section and Triton's binary tensor data extension.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidRequestError
from headrace.rpc.limits.wire_limits import fields
from headrace_protos import inference_pb2 as pb

Array = NDArray[Any]
DType = np.dtype[Any]
Shape = tuple[int, ...]
C = TypeVar("C", bytes, bytes | memoryview)

BYTES = "BYTES"
BF16 = "BF16"

# Of each datatype: the numpy type that holds it, and the field of typed contents that it belongs in.
_TYPES: Mapping[str, tuple[DType, str | None]] = {
    "BOOL": (np.dtype(np.bool_), "bool_contents"),
    "INT8": (np.dtype(np.int8), "int_contents"),
    "INT16": (np.dtype("<i2"), "int_contents"),
    "INT32": (np.dtype("<i4"), "int_contents"),
    "INT64": (np.dtype("<i8"), "int64_contents"),
    "UINT8": (np.dtype(np.uint8), "uint_contents"),
    "UINT16": (np.dtype("<u2"), "uint_contents"),
    "UINT32": (np.dtype("<u4"), "uint_contents"),
    "UINT64": (np.dtype("<u8"), "uint64_contents"),
    "FP16": (np.dtype("<f2"), None),
    "FP32": (np.dtype("<f4"), "fp32_contents"),
    "FP64": (np.dtype("<f8"), "fp64_contents"),
    BF16: (np.dtype("<u2"), None),
    BYTES: (np.dtype(object), "bytes_contents"),
}
DATATYPES = frozenset(_TYPES)
MAX_BYTES_ELEMENTS = 65_536  # Of all BYTES tensors together: each becomes an object and is checked individually.
_PIECE = 8192  # Numbers converted by one call, in less than a millisecond: other threads run between two calls.
_LENGTH = struct.Struct("<I")
_MAX_ELEMENTS = 2**59  # Bytes of any datatype stay within 63 bits.


@dataclass(frozen=True)
class Tensor:
    """A named array with its protocol datatype; the datatype distinguishes BF16 from UINT16."""

    name: str
    datatype: str
    array: Array

    @property
    def shape(self) -> Shape:
        return self.array.shape


@dataclass(frozen=True)
class RawTensor:
    """Raw contents with their protocol datatype, for tensors that need no decoding or that numpy cannot hold."""

    datatype: str
    shape: Shape
    data: bytes | memoryview


def decode_inputs(request: pb.ModelInferRequest) -> dict[str, Tensor]:
    """The request's inputs by name."""
    return decode(request.inputs, request.raw_input_contents, "input")


def decode_outputs(response: pb.ModelInferResponse) -> dict[str, Tensor]:
    """The response's outputs by name."""
    return decode(response.outputs, response.raw_output_contents, "output")


def decode(described: Sequence[Any], raw_contents: Sequence[bytes | memoryview], kind: str) -> dict[str, Tensor]:
    """Inputs or outputs by name, from their descriptions and raw contents; `kind` is their name in errors."""
    tensors: dict[str, Tensor] = {}
    for name, description, dtype, shape, raw in _described(described, raw_contents, kind):
        if raw is None:
            array = _from_typed(name, description.datatype, dtype, shape, description.contents)
        else:
            array = _from_raw(name, description.datatype, dtype, shape, raw)
        tensors[name] = Tensor(name, description.datatype, array)
    return tensors


def raw_inputs(request: pb.ModelInferRequest) -> dict[str, RawTensor]:
    """The request's inputs by name, checked as `decode_inputs` checks them but not decoded."""
    tensors = _raw_tensors(request.inputs, request.raw_input_contents, "input")
    if request.raw_input_contents:  # Typed contents were checked as they became raw ones.
        for name, tensor in tensors.items():
            if tensor.datatype == BYTES:
                count = _bytes_count(name, tensor.shape)
                _check_count(name, tensor.shape, count, sum(1 for _ in _bytes_spans(name, tensor.data, count)))
            else:
                decode_raw(name, tensor)
    return tensors


def raw_outputs(response: pb.ModelInferResponse) -> dict[str, RawTensor]:
    """The response's outputs by name, whose raw contents are not checked."""
    return _raw_tensors(response.outputs, response.raw_output_contents, "output")


def dtype_of(name: str, datatype: str) -> DType:
    """The numpy type that holds a datatype; `name` is the tensor's, for the error."""
    try:
        return _TYPES[datatype][0]
    except KeyError:
        raise InvalidRequestError(f"tensor {name!r}: unknown datatype {datatype!r}") from None


def checked_shape(name: str, dimensions: Sequence[int]) -> Shape:
    """The dimensions, where they are a shape that numpy can hold."""
    shape = tuple(dimensions)
    if any(size < 0 for size in shape):
        raise InvalidRequestError(f"tensor {name!r}: negative size in shape {list(shape)}")
    if len(shape) > 32:
        raise InvalidRequestError(f"tensor {name!r}: {len(shape)} dimensions, at most 32 are allowed")
    # numpy checks this of empty tensors too, whose other sizes nothing else bounds.
    if math.prod(size for size in shape if size) > _MAX_ELEMENTS:
        raise InvalidRequestError(f"tensor {name!r}: shape {list(shape)} is too large")
    return shape


def decode_raw(name: str, tensor: RawTensor) -> Array:
    return _from_raw(name, tensor.datatype, dtype_of(name, tensor.datatype), tensor.shape, tensor.data)


def add_raw_output(response: pb.ModelInferResponse, name: str, tensor: RawTensor) -> None:
    """Appends raw contents to a response, as they are."""
    response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.append(bytes(tensor.data))


def add_input(request: pb.ModelInferRequest, tensor: Tensor) -> None:
    """Appends a tensor to a request, raw."""
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
    request.raw_input_contents.append(encode_raw(tensor))


def add_output(response: pb.ModelInferResponse, tensor: Tensor) -> None:
    """Appends a tensor to a response, raw."""
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
    response.raw_output_contents.append(encode_raw(tensor))


def encode_raw(tensor: Tensor) -> bytes:
    if tensor.datatype == BYTES:
        return b"".join(_LENGTH.pack(len(item)) + item for item in map(_as_bytes, tensor.array.ravel()))
    check_dtype(tensor)
    return tensor.array.tobytes()


def check_dtype(tensor: Tensor) -> None:
    """Refuses an array whose numpy type is not the datatype's."""
    if tensor.array.dtype != dtype_of(tensor.name, tensor.datatype):
        raise InvalidRequestError(f"tensor {tensor.name!r}: {tensor.array.dtype} is not {tensor.datatype}")


def bytes_tensor(name: str, values: Iterable[bytes]) -> Tensor:
    """A BYTES tensor of one dimension."""
    items = list(values)
    return Tensor(name, BYTES, _object_array(items, (len(items),)))


def _raw_tensors(described: Sequence[Any], raw_contents: Sequence[bytes], kind: str) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    for name, description, dtype, shape, raw in _described(described, raw_contents, kind):
        if raw is None:
            array = _from_typed(name, description.datatype, dtype, shape, description.contents)
            raw = encode_raw(Tensor(name, description.datatype, array))
        tensors[name] = RawTensor(description.datatype, shape, raw)
    return tensors


def _described(
    described: Sequence[Any], raw_contents: Sequence[C], kind: str
) -> Iterator[tuple[str, Any, DType, Shape, C | None]]:
    """Each tensor's name, description, type and shape, and its raw contents, which are None where they are typed."""
    if raw_contents and len(raw_contents) != len(described):
        raise InvalidRequestError(
            f"{len(described)} {kind}s but {len(raw_contents)} raw contents: raw must hold every {kind}"
        )
    names: set[str] = set()
    texts = 0
    for index, description in enumerate(described):
        name = description.name
        if not name:
            raise InvalidRequestError(f"{kind} {index} has no name")
        if name in names:
            raise InvalidRequestError(f"{kind} {name!r} is given twice")
        names.add(name)
        dtype, shape = dtype_of(name, description.datatype), checked_shape(name, description.shape)
        if description.datatype == BYTES:
            texts += _bytes_count(name, shape)
            if texts > MAX_BYTES_ELEMENTS:
                raise InvalidRequestError(f"the {kind}s have more than {MAX_BYTES_ELEMENTS} BYTES elements together")
        if raw_contents and description.HasField("contents"):
            raise InvalidRequestError(f"{kind} {name!r} has both raw and typed contents")
        yield name, description, dtype, shape, raw_contents[index] if raw_contents else None


def _from_raw(name: str, datatype: str, dtype: DType, shape: Shape, raw: bytes | memoryview) -> Array:
    if datatype == BYTES:
        raw = bytes(raw)
        count = _bytes_count(name, shape)
        items = [raw[start:end] for start, end in _bytes_spans(name, raw, count)]
        if len(items) > count:
            raise InvalidRequestError(f"tensor {name!r}: shape {list(shape)} holds {count} elements, got more")
        _check_count(name, shape, count, len(items))
        return _object_array(items, shape)
    count = math.prod(shape)
    if len(raw) != count * dtype.itemsize:
        raise InvalidRequestError(
            f"tensor {name!r}: {datatype} of shape {list(shape)} is {count * dtype.itemsize} bytes, got {len(raw)}"
        )
    if datatype == "BOOL":
        bits = np.frombuffer(raw, dtype=np.uint8)
        if bits.size and bits.max() > 1:
            raise InvalidRequestError(f"tensor {name!r}: BOOL bytes must be 0 or 1")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _bytes_count(name: str, shape: Shape) -> int:
    count = math.prod(shape)
    if count > MAX_BYTES_ELEMENTS:
        raise InvalidRequestError(f"tensor {name!r}: {count} BYTES elements, at most {MAX_BYTES_ELEMENTS} are allowed")
    return count


def _bytes_spans(name: str, raw: bytes | memoryview, expected: int) -> Iterator[tuple[int, int]]:
    """Where each element of a BYTES tensor begins and ends, up to one more than expected."""
    at = count = 0
    while at < len(raw) and count <= expected:
        count += 1
        start = at + _LENGTH.size
        if start > len(raw):
            raise InvalidRequestError(f"tensor {name!r}: BYTES contents end inside a length")
        (length,) = _LENGTH.unpack_from(raw, at)
        at = start + length
        if at > len(raw):
            raise InvalidRequestError(f"tensor {name!r}: BYTES element of {length} bytes ends beyond the contents")
        yield start, at


def _from_typed(name: str, datatype: str, dtype: DType, shape: Shape, contents: pb.InferTensorContents) -> Array:
    field = _TYPES[datatype][1]
    if field is None:
        raise InvalidRequestError(f"tensor {name!r}: {datatype} can only be sent in raw contents")
    for other, _ in contents.ListFields():
        if other.name != field:
            raise InvalidRequestError(f"tensor {name!r}: {datatype} belongs in {field}, not in {other.name}")
    values = getattr(contents, field)
    _check_count(name, shape, math.prod(shape), len(values))
    if datatype == BYTES:
        return _object_array(values, shape)
    if dtype.kind == "f":
        return _packed(contents, field, dtype).reshape(shape)
    array = np.empty(len(values), dtype=dtype)
    limits = None if dtype.kind == "b" else np.iinfo(dtype)
    for first in range(0, len(values), _PIECE):
        piece = values[first : first + _PIECE]
        if limits is not None and (min(piece) < limits.min or max(piece) > limits.max):
            raise InvalidRequestError(f"tensor {name!r}: a value does not fit {datatype}")
        array[first : first + _PIECE] = piece
    return array.reshape(shape)


def _packed(contents: pb.InferTensorContents, field: str, dtype: DType) -> Array:
    """Numbers of fixed size as protobuf writes them, which is how numpy has them too."""
    data, number = contents.SerializeToString(), contents.DESCRIPTOR.fields_by_name[field].number
    for found, _, start, end in fields(data):
        if found == number:
            return np.frombuffer(data, dtype, (end - start) // dtype.itemsize, start)
    return np.empty(0, dtype)


def _check_count(name: str, shape: Shape, expected: int, actual: int) -> None:
    if expected != actual:
        raise InvalidRequestError(f"tensor {name!r}: shape {list(shape)} holds {expected} elements, got {actual}")


def _object_array(items: Sequence[bytes], shape: Shape) -> Array:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


def _as_bytes(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise InvalidRequestError(f"an element of a BYTES tensor is {type(item).__name__}, not bytes or text")
