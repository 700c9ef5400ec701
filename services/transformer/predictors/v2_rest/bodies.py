"""Bodies of `infer` at a server: of serialized messages, and back. What reads them is headrace/oip/body_tensors.py.

A server that lists `binary_tensor_data` gets tensors as binary data and is asked for the same; another one gets JSON,
in which FP16 and BF16 are numbers and BYTES must be UTF-8. An answer may have either form. Parameters that begin with
`triton_` are the transport's own and stay here; of an answer's, lists and objects become JSON text and null is left
out.

Raises InvalidRequestError for an invalid request, BrokenAnswerError for an invalid answer, and TooLargeError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import InvalidRequestError, TooLargeError
from headrace.oip.body_tensors import (
    BINARY,
    BINARY_ALL,
    BINARY_SIZE,
    MAX_BODY_BYTES,
    MAX_TENSORS,
    BodyTensor,
    Parameters,
    add_tensors,
    serialized,
    split_body,
    validated,
)
from headrace.oip.json_parameters import plain_parameters
from headrace.oip.json_tensors import array_json
from headrace.oip.json_text import load_object
from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import RawTensor, decode_raw, raw_inputs
from headrace.oip.wire_fields import fields
from headrace_protos import inference_pb2 as pb
from services.transformer.predictors.answers import predictor_answers

_RAW_INPUTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_CLASSIFICATION = "classification"
_MAX_FIELDS = 4096  # Inputs, outputs and parameters of a request.

Contents = bytes | memoryview


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    outputs: list[BodyTensor] = Field(max_length=MAX_TENSORS)
    parameters: Parameters = None


def split_request(data: bytes) -> tuple[bytes, list[memoryview]]:
    """A serialized request without its raw contents, and these, which are not copied."""
    head, raw, view = [], [], memoryview(data)
    try:
        for count, (field, start, contents, end) in enumerate(fields(view)):
            if count >= _MAX_FIELDS:
                raise InvalidRequestError(f"the request has more than {_MAX_FIELDS} inputs, outputs and parameters")
            if field == _RAW_INPUTS:
                raw.append(view[contents:end])
            else:
                head.append(view[start:end])
    except DecodeError:
        raise _not_a_request() from None
    return b"".join(head), raw


def binary_body(head: bytes, raw: Sequence[memoryview]) -> tuple[int, list[Contents]]:
    """A request with its tensors as binary data: the size of the JSON, and the body in parts."""
    request = _parsed(head)
    contents: Sequence[Contents] = raw or [tensor.data for tensor in raw_inputs(request).values()]
    if len(contents) != len(request.inputs):
        raise InvalidRequestError(
            f"{len(request.inputs)} inputs but {len(contents)} raw contents: raw must hold every input"
        )
    inputs = []
    for tensor, data in zip(request.inputs, contents, strict=True):
        parameters = plain_parameters(tensor.parameters) | {BINARY_SIZE: len(data)}
        inputs.append(_entry(tensor, parameters) | {"datatype": tensor.datatype, "shape": list(tensor.shape)})
    outputs = []
    for output in request.outputs:
        parameters = plain_parameters(output.parameters)
        outputs.append(_entry(output, parameters | ({} if _CLASSIFICATION in parameters else {BINARY: True})))
    text = _document(request, inputs, outputs, {BINARY_ALL: True})
    return len(text), [text, *contents]


def write_binary_body(data: bytes) -> tuple[int, bytes]:
    """`binary_body` for a process of bodies, of a request with typed contents."""
    header_length, parts = binary_body(data, ())
    return header_length, b"".join(parts)


def write_json_body(data: bytes) -> tuple[None, bytes]:
    """A serialized request as JSON, here or in a process of bodies."""
    request = _parsed(data)
    inputs, size = [], 0
    for tensor, raw in zip(request.inputs, raw_inputs(request).items(), strict=True):
        text = _input_json(*raw)
        size += len(text)
        if size > MAX_BODY_BYTES:
            raise TooLargeError(f"the request has {size} bytes or more as JSON, at most {MAX_BODY_BYTES} are sent")
        described = {"datatype": tensor.datatype, "shape": list(tensor.shape), "data": orjson.Fragment(text)}
        inputs.append(_entry(tensor, plain_parameters(tensor.parameters)) | described)
    outputs = [_entry(output, plain_parameters(output.parameters)) for output in request.outputs]
    return None, _document(request, inputs, outputs, {})


def read_answer(body: bytes, header_length: int | None) -> tuple[None, bytes]:
    """An answer's body as a serialized ModelInferResponse, here or in a process of bodies."""
    with predictor_answers():
        head, binary = split_body(body, header_length)
        answer = validated(_Answer, load_object(head))
        response = pb.ModelInferResponse(
            model_name=answer.model_name or "", model_version=answer.model_version or "", id=answer.id or ""
        )
        contents = add_tensors(response.outputs, answer.outputs, binary, "output", halves=True)
        for tensor, described in zip(answer.outputs, response.outputs, strict=True):
            if tensor.parameters:
                set_parameters(described.parameters, _flat(tensor.parameters))
        set_parameters(response.parameters, _flat(answer.parameters or {}))
        if (size := sum(len(part) for parts in contents for part in parts)) > MAX_BODY_BYTES:
            message = f"the predictor's answer has {size} bytes of tensors, at most {MAX_BODY_BYTES} are passed on"
            raise TooLargeError(message, hop="predictor")
        return None, serialized(response, _RAW_OUTPUTS, contents)


def _parsed(data: bytes) -> pb.ModelInferRequest:
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError:
        raise _not_a_request() from None


def _not_a_request() -> InvalidRequestError:
    return InvalidRequestError("the request is not the message that the method takes")


def _input_json(name: str, tensor: RawTensor) -> bytes:
    try:
        return array_json(tensor.datatype, decode_raw(name, tensor))
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"input {name!r} is not UTF-8, and the predictor takes no binary tensors by REST"
        ) from None


def _entry(tensor: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tensor.name, "parameters": parameters} if parameters else {"name": tensor.name}


def _document(
    request: pb.ModelInferRequest,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    own: dict[str, Any],
) -> bytes:
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    if parameters := plain_parameters(request.parameters) | own:
        document["parameters"] = parameters
    document["inputs"] = inputs
    if outputs:
        document["outputs"] = outputs
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:  # Of parameters: a number beyond 64 bits or half of a surrogate pair.
        raise InvalidRequestError(f"the request has no JSON form: {error}") from None


def _flat(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as the protocol's map takes them."""
    return {
        name: orjson.dumps(value).decode() if isinstance(value, (list, dict)) else value
        for name, value in parameters.items()
        if name != BINARY_SIZE
    }
