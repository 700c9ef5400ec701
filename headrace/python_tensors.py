"""Converts results of users' code, numpy arrays by name, to tensors of the protocol, and their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import BYTES, RawTensor, Tensor
from headrace_protos import inference_pb2 as pb

_DATATYPES = {
    np.dtype(code): datatype
    for code, datatype in {
        "?": "BOOL", "i1": "INT8", "<i2": "INT16", "<i4": "INT32", "<i8": "INT64", "u1": "UINT8", "<u2": "UINT16",
        "<u4": "UINT32", "<u8": "UINT64", "<f2": "FP16", "<f4": "FP32", "<f8": "FP64",
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """A Python model's answer with parameters (bool, int, float or str) besides the outputs."""

    outputs: Mapping[str, Any]
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


class BadResultError(Exception):
    """The result of a user's code is not tensors; the client gets the message too."""


def as_mapping(result: Any, who: str) -> Mapping[str, Any]:
    """The result of a user's code; `who` is its name in messages."""
    if not isinstance(result, Mapping):
        raise BadResultError(f"{who} answered with {type(result).__name__}, not with a dict of name to numpy array")
    return result


def as_tensor(name: Any, value: Any, who: str) -> Tensor | RawTensor:
    """One entry of such a result; text and bytes become BYTES."""
    if not isinstance(name, str) or not name:
        raise BadResultError(f"the name of {who}'s output is {name!r}, not text")
    if isinstance(value, RawTensor):
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        raise BadResultError(f"{who}'s output {name!r} is {type(value).__name__}, not a numpy array")
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        array = array.astype(object)
        if not all(isinstance(item, (bytes, str)) for item in array.ravel()):
            raise BadResultError(f"{who}'s output {name!r} holds objects that are neither bytes nor text")
        return Tensor(name, BYTES, array)
    array = np.asarray(array, array.dtype.newbyteorder("<"))
    if array.dtype not in _DATATYPES:
        raise BadResultError(f"{who}'s output {name!r} has the dtype {array.dtype}, which no datatype of OIP holds")
    return Tensor(name, _DATATYPES[array.dtype], array)


def write_response_parameters(response: pb.ModelInferResponse, given: Any) -> None:
    """Adds parameters from a user's code; raises BadResultError unless they are bool, int, float or str by name."""
    try:
        for name, value in given.items():
            if not isinstance(name, str) or not name or name.startswith("triton_"):
                raise ValueError(f"{name!r} is not a name for a parameter")
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{name!r} is {type(value).__name__}")
            set_parameters(response.parameters, {name: value})
    except (AttributeError, TypeError, ValueError) as error:
        raise BadResultError(f"the model answered with parameters that cannot be sent: {error}") from None
