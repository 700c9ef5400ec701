"""Tensors in JSON: lists of numbers, booleans or strings to a tensor's raw contents, and back.

Data may be nested like the shape or flat; a tensor of one element may be the element itself. Integers must fit their
datatype, BOOL takes only `true` and `false`, BYTES takes strings, kept as UTF-8. FP32 and FP64 take any number, `NaN`
and the infinities, but no finite number that overflows. FP16 and BF16 have no JSON form in the protocol. Sizes are
compared before memory is allocated.

Raises InvalidRequestError. Large tensors are worked on a slice at a time, see json_text.
Source: the protocol's "Tensor Data" section and Triton's http_server.cc.
"""

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from headrace.errors import InvalidRequestError
from headrace.oip.json_text import SLICE, dump_array
from headrace.oip.tensors import BF16, BYTES, Array, RawTensor, checked_shape, decode_raw, dtype_of
from headrace_transformer.predictors.oip.oip_call import predictor_answers

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
