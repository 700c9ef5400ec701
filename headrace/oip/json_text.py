"""JSON as Triton reads and writes it: with `NaN`, `Infinity` and `-Infinity`, which JSON itself lacks.

Arrays of numbers are written from numpy a slice at a time, so that a thread that writes a large one does not block
others. FP32 is written with as many digits as make it FP32 again.

Source: triton_json.h of triton-inference-server/common, whose flags allow the three names both ways.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from headrace.errors import InvalidRequestError, TooLargeError
from headrace.oip.tensors import Array

SLICE = 65536  # Elements: a few milliseconds.

_MAX_NESTED = 8 * 1024 * 1024  # Lists and objects, which take 64 bytes and more each.
_NON_FINITE = re.compile(rb"NaN|Inf")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load_object(data: bytes | memoryview) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object; raises InvalidRequestError."""
    if not len(data):
        return {}
    if len(data) > _MAX_NESTED and sum(bytes(data).count(opener) for opener in (b"[", b"{")) > _MAX_NESTED:
        raise TooLargeError(f"the body has more than {_MAX_NESTED} lists and objects")
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        values = _load_with_names(data, error)
    if not isinstance(values, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return values


def _load_with_names(data: bytes | memoryview, refused: orjson.JSONDecodeError) -> Any:
    """Reads the names of numbers that orjson does not know, by the slower parser."""
    if _NON_FINITE.search(data):
        try:
            values = json.loads(bytes(data))
            if _SURROGATE.search(data):  # orjson refuses strings that are not UTF-8, Python's parser does not.
                json.dumps(values, ensure_ascii=False).encode()
            return values
        except UnicodeEncodeError:
            raise InvalidRequestError("the body is not JSON: a string has half of a surrogate pair") from None
        except (ValueError, RecursionError):
            pass  # The message of orjson is better.
    raise InvalidRequestError(f"the body is not JSON: {refused}") from None


def dump_array(array: Array) -> bytes:
    """A numeric array as one flat JSON array, row by row."""
    return b"[" + b",".join(_dump_slices(array.ravel())) + b"]"


def _dump_slices(flat: Array) -> Iterator[bytes]:
    for start in range(0, flat.size, SLICE):
        part = flat[start : start + SLICE]
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            yield json.dumps(part.tolist(), separators=(",", ":"))[1:-1].encode()
        else:
            yield orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
