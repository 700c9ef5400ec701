"""Inputs and results of a Python model: converts the protocol's messages to numpy arrays and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.oip.parameters import read_parameters
from headrace.oip.tensors import Array, RawTensor, add_output, add_raw_output, decode_raw, raw_inputs
from headrace.python_tensors import Response, as_mapping, as_tensor, write_response_parameters
from headrace_predictor.models.served_model import VERSION
from headrace_protos import inference_pb2 as pb


class Request:
    """The argument of `execute`.

    `id` is the client's. `parameters` are the request's, as bool, int, float or str. `inputs` maps names to numpy
    arrays: BYTES are object arrays of `bytes`, BF16 the bits as uint16; types of fixed size are read-only views of the
    message. `raw` has the same tensors, not decoded.
    """

    def __init__(self, message: pb.ModelInferRequest) -> None:
        self.id: str = message.id
        self.parameters: dict[str, Any] = read_parameters(message.parameters)
        self.raw: Mapping[str, RawTensor] = raw_inputs(message)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        return {name: decode_raw(name, tensor) for name, tensor in self.raw.items()}


def write_result(request: pb.ModelInferRequest, result: Any) -> pb.ModelInferResponse:
    """Converts a result of `execute` to a response with the outputs that the request names, or with all of them."""
    parameters = result.parameters if isinstance(result, Response) else {}
    outputs = as_mapping(result.outputs if isinstance(result, Response) else result, "the model")
    names = [output.name for output in request.outputs] or list(outputs)
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    write_response_parameters(response, parameters)
    for name in names:
        if name not in outputs:
            raise InvalidRequestError(f"unknown output {name!r}; the model gives {', '.join(map(str, outputs))}")
        tensor = as_tensor(name, outputs[name], "the model")
        if isinstance(tensor, RawTensor):
            add_raw_output(response, name, tensor)
        else:
            add_output(response, tensor)
    return response
