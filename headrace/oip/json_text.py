"""JSON as Triton reads and writes it: with `NaN`, `Infinity` and `-Infinity`, which JSON itself lacks.

Arrays of numbers are written from numpy a slice at a time, so that a thread that writes a large one does not block
others. FP32 is written with as many digits as make it FP32 again.

Source: triton_json.h of triton-inference-server/common, whose flags allow the three names both ways.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
from pydantic_core import from_json

from headrace.errors import InvalidRequestError, TooLargeError
from headrace.oip.tensors import Array

SLICE = 65536  # Elements: a few milliseconds.

_MAX_NESTED = 8 * 1024 * 1024  # Lists and objects, which take 64 bytes and more each.
_NON_FINITE = re.compile(rb"NaN|Inf")


def load_object(data: bytes | memoryview) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object; raises InvalidRequestError."""
    if not len(data):
        return {}
    if len(data) > _MAX_NESTED and sum(bytes(data).count(opener) for opener in (b"[", b"{")) > _MAX_NESTED:
        raise TooLargeError(f"the body has more than {_MAX_NESTED} lists and objects")
    values = _load(data)
    if not isinstance(values, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return values


def _load(data: bytes | memoryview) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if _NON_FINITE.search(data):  # Names of numbers that orjson does not know; its messages are better.
            with suppress(ValueError):
                return from_json(bytes(data))
        raise InvalidRequestError(f"the body is not JSON: {error}") from None


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
