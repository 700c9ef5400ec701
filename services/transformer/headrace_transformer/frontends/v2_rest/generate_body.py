"""Bodies of Triton's generate extension: a JSON object of inputs and parameters in, one of outputs out.

A field that has the name of one of the model's inputs becomes that tensor: one value or a list, of which the model's
metadata gives datatype and shape. Any other field is a parameter of the request, and so are those of the object
`parameters`, unless an input has their name; `id` is the request's, null means absent. Sampling parameters of a text
model may be lists and objects too, and so may `sampling_parameters`.

For a model that declares no inputs, each field is a tensor (BOOL, INT64, FP64 or BYTES, shaped as its list) and
`parameters` holds the parameters.

An answer has `model_name`, `model_version`, `id` if the request has one, the response's parameters and each output by
its name: a value where it is one element, else a flat list.

Source: Triton's generate extension, and its http_server.cc for shapes and fields.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.errors import InvalidRequestError
from headrace.oip.json_text import load_object
from headrace.oip.parameters import plain_parameters, write_parameters
from headrace.oip.tensors import BYTES, RawTensor
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.v2_rest.infer_body import answered_tensors, parsed_answer
from headrace_transformer.frontends.v2_rest.tensors import fitted_shape, flattened, json_of, serialized, tensor_of

_PARAMETERS = "parameters"
_SAMPLING = "sampling_parameters"
_DATATYPES = (("BOOL", {bool}), ("INT64", {int}), ("FP64", {int, float}), (BYTES, {str}))


def read_generate(data: bytes, model: str, version: str, metadata: bytes) -> tuple[None, bytes]:
    """For `BodyProcesses`: the serialized request that a body makes to a model, given its serialized metadata.

    Raises InvalidRequestError.
    """
    fields = {name: value for name, value in load_object(data).items() if value is not None}
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    request.id = _text(fields.pop("id", ""), "id")
    given = fields.pop(_PARAMETERS, {})
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{_PARAMETERS} must be an object")

    inputs = {declared.name: declared for declared in pb.ModelMetadataResponse.FromString(metadata).inputs}
    tensors: dict[str, RawTensor] = {}
    parameters = {name: value for name, value in given.items() if value is not None}
    if inputs:
        parameters |= _without(fields, parameters)
        if _SAMPLING in inputs:
            _move_to_sampling(parameters, inputs)
        for name in [name for name in parameters if name in inputs]:
            tensors[name] = _declared_tensor(inputs[name], parameters.pop(name))
    else:
        tensors = {name: _undeclared_tensor(name, value) for name, value in fields.items()}
    write_parameters(request.parameters, parameters)
    return None, serialized(request, tensors)


def write_answer(serialized: pb.ModelInferResponse | bytes) -> tuple[None, bytes]:
    """For `BodyProcesses`: a response as JSON; raises InvalidRequestError where that cannot hold it, HopBrokenError."""
    response = parsed_answer(serialized)
    answer: dict[str, Any] = {"id": response.id} if response.id else {}
    answer |= {"model_name": response.model_name, "model_version": response.model_version}
    answer |= plain_parameters(response.parameters)
    for name, tensor in answered_tensors(response).items():
        text = json_of(name, tensor)
        is_single = all(size == 1 for size in tensor.shape)
        answer[name] = orjson.Fragment(text[1:-1] if is_single else text)
    return None, orjson.dumps(answer)


def _without(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields, of which none may be among the parameters as well."""
    for name in fields:
        if name in parameters:
            raise InvalidRequestError(f"{name!r} is given twice, beside {_PARAMETERS} and in it")
    return fields


def _move_to_sampling(parameters: dict[str, Any], inputs: Mapping[str, Any]) -> None:
    """Puts lists and objects, which the protocol's parameters cannot hold, into the sampling parameters."""
    lists = {
        name: value for name, value in parameters.items() if isinstance(value, (list, dict)) and name not in inputs
    }
    sampling = parameters.get(_SAMPLING, {})
    if isinstance(sampling, dict):
        sampling = sampling | lists
    elif lists:
        raise InvalidRequestError(f"{next(iter(lists))!r} is a list or an object: put it into {_SAMPLING}")
    else:
        return
    for name in lists:
        del parameters[name]
    if sampling:
        try:
            parameters[_SAMPLING] = orjson.dumps(sampling).decode()
        except orjson.JSONEncodeError:  # orjson reads what is nested deeper than it writes.
            raise InvalidRequestError("lists and objects are nested too deep") from None


def _declared_tensor(declared: pb.ModelMetadataResponse.TensorMetadata, value: Any) -> RawTensor:
    flat, shape = flattened(declared.name, value)
    if len(shape) < 2:  # The nesting of deeper lists is their shape.
        shape = fitted_shape(declared.name, declared.shape, len(flat))
    return tensor_of(declared.name, declared.datatype, shape, flat)


def _undeclared_tensor(name: str, value: Any) -> RawTensor:
    flat, shape = flattened(name, value)
    types = set(map(type, flat))
    for datatype, allowed in _DATATYPES:
        if types <= allowed:
            return tensor_of(name, datatype, shape or (1,), flat)
    raise InvalidRequestError(f"input {name!r} must be a number, true, false or a string, or a list of one of them")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string")
    return value
