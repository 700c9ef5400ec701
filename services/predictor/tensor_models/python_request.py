"""What a Python model takes and gives: the protocol's messages as numpy arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from millrace.errors import InvalidRequestError
from millrace.protos import inference_pb2 as pb
from millrace.tensors import BYTES, Array, RawTensor, Tensor, add_output, add_raw_output, decode_raw, raw_inputs
from services.predictor.served_model import VERSION

_DATATYPES = {
    np.dtype(code): datatype
    for code, datatype in {
        "?": "BOOL", "i1": "INT8", "<i2": "INT16", "<i4": "INT32", "<i8": "INT64", "u1": "UINT8", "<u2": "UINT16",
        "<u4": "UINT32", "<u8": "UINT64", "<f2": "FP16", "<f4": "FP32", "<f8": "FP64",
    }.items()
}  # fmt: skip


class BadResultError(Exception):
    """What a model gave is not tensors; the message says so to the client as well."""


class Request:
    """What `execute` is called with.

    `id` is the client's. `parameters` are the request's, as bool, int, float or str. `inputs` maps
    names to numpy arrays: BYTES are object arrays of `bytes`, BF16 its bits as uint16; those of fixed
    size are read-only views of the message. `raw` has the same tensors as they came, undecoded.
    """

    def __init__(self, message: pb.ModelInferRequest) -> None:
        self.id: str = message.id
        self.parameters: dict[str, Any] = _parameters(message)
        self.raw: Mapping[str, RawTensor] = raw_inputs(message)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        return {name: decode_raw(name, tensor) for name, tensor in self.raw.items()}


def write_result(request: pb.ModelInferRequest, result: Any) -> pb.ModelInferResponse:
    """A result of `execute` as a response, with the outputs that the request names, or all of them."""
    if not isinstance(result, Mapping):
        raise BadResultError(f"the model answered with {type(result).__name__}, not with a dict of name to numpy array")
    wanted = [output.name for output in request.outputs] or list(result)
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    for name in wanted:
        if name not in result:
            raise InvalidRequestError(f"unknown output {name!r}; the model gives {', '.join(map(str, result))}")
        _add(response, name, result[name])
    return response


def _add(response: pb.ModelInferResponse, name: Any, value: Any) -> None:
    if not isinstance(name, str) or not name:
        raise BadResultError(f"the name of the model's output is {name!r}, not text")
    if isinstance(value, RawTensor):
        add_raw_output(response, name, value)
        return
    if not isinstance(value, (np.ndarray, np.generic)):
        raise BadResultError(f"the model's output {name!r} is {type(value).__name__}, not a numpy array")
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        array = array.astype(object)
        if not all(isinstance(item, (bytes, str)) for item in array.ravel()):
            raise BadResultError(f"the model's output {name!r} holds objects that are neither bytes nor text")
        add_output(response, Tensor(name, BYTES, array))
        return
    array = np.asarray(array, array.dtype.newbyteorder("<"))
    if array.dtype not in _DATATYPES:
        raise BadResultError(f"the model's output {name!r} has the dtype {array.dtype}, which no datatype of OIP holds")
    add_output(response, Tensor(name, _DATATYPES[array.dtype], array))


def _parameters(message: pb.ModelInferRequest) -> dict[str, Any]:
    """The request's parameters but for Triton's own, which speak to the server."""
    values = {}
    for name, parameter in message.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequestError(f"parameter {name!r} has no value")
        if not name.startswith("triton_"):
            values[name] = getattr(parameter, choice)
    return values
