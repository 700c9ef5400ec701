"""Bodies of `infer`: a JSON object, with tensors inside it or as binary data behind it.

With the header `inference-header-content-length` binary data follows the JSON (tensors.py). Length 0 is a raw
binary request: the body is the contents of a model's one input. Answers have the same form: an output is binary if the
request sets `binary_data` of that output, or `binary_data_output` for all outputs that it does not name; a raw binary
request gets all outputs so.

Other parameters are passed on. Refused are names that begin with `triton_`, the classification and shared-memory
extensions, and bytes that belong to no input. Invalid tensors in an answer are the model's fault: HopBrokenError.

Source: Triton's binary tensor data extension.

A body that a client has compressed by `deflate` (zlib's format) is inflated; the gateway inflates gzip. One that would
exceed the gateway's limit is refused before. Source: RFC 9110, section 8.4.1.
"""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from headrace.errors import InvalidRequestError, TooLargeError
from headrace.oip.model_description import check_names
from headrace.oip.parameters import plain_parameters, write_parameters
from headrace.oip.tensors import BYTES, RawTensor, dtype_of, raw_outputs
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.v2_rest.tensors import (
    BINARY,
    BINARY_ALL,
    BINARY_SIZE,
    MAX_BODY_BYTES,
    NamedTensor,
    fitted_shape,
    json_of,
    read_inputs,
    serialized,
    split_body,
)
from headrace_transformer.predictors.oip.oip_call import predictor_answers

CONTENT_ENCODING = "content-encoding"
DEFLATE = "deflate"
MAX_BYTES = 60 * 1024 * 1024  # The gateway's limit of a body.


class OutputForm(NamedTuple):
    """The form of outputs: binary or JSON by name in `named`, otherwise by `binary`."""

    binary: bool
    named: Mapping[str, bool] = {}

    @property
    def wants_json(self) -> bool:
        """Whether any output may be returned as JSON."""
        return not (all(self.named.values()) if self.named else self.binary)


def read_body(data: bytes, model: str, version: str, header_length: int | None) -> tuple[OutputForm, bytes]:
    """The serialized request in a body that is JSON, or JSON and binary data; raises InvalidRequestError."""
    body, binary_data = split_body(data, header_length)
    for tensor in (*body.inputs, *(body.outputs or ())):
        _check_extensions(tensor)
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=body.id or "")
    inputs = read_inputs(body.inputs, binary_data)

    parameters = dict(body.parameters or {})
    binary = _truth(parameters.pop(BINARY_ALL, None), BINARY_ALL) or False
    write_parameters(request.parameters, parameters)
    named: dict[str, bool] = {}
    for output in body.outputs or ():
        if output.name in named:
            raise InvalidRequestError(f"output {output.name!r} is given twice")
        wanted = _truth(output.parameter(BINARY), BINARY)
        named[output.name] = binary if wanted is None else wanted
        request.outputs.add(name=output.name)
    return OutputForm(binary, named), serialized(request, inputs)


def read_raw_body(
    data: bytes, model: str, version: str, metadata: pb.ModelMetadataResponse
) -> tuple[OutputForm, bytes]:
    """As `read_body`, of a raw binary request, given the model's metadata."""
    if len(metadata.inputs) != 1:
        raise InvalidRequestError(
            f"a raw binary request needs a model of one input; {model!r} has {len(metadata.inputs)}"
        )
    (entry,) = metadata.inputs
    if entry.datatype == BYTES:
        count, data = 1, len(data).to_bytes(4, "little") + data
    else:
        count, rest = divmod(len(data), dtype_of(entry.name, entry.datatype).itemsize)
        if rest:
            raise InvalidRequestError(f"{len(data)} bytes are not a whole number of elements of {entry.datatype}")
    tensor = RawTensor(entry.datatype, fitted_shape(entry.name, entry.shape, count), data)
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    return OutputForm(binary=True), serialized(request, {entry.name: tensor})


def write_body(answer: pb.ModelInferResponse | bytes, form: OutputForm) -> tuple[int | None, bytes]:
    """How much of an answer's body is JSON, where binary data follows, and the body.

    Raises InvalidRequestError where an output that was asked for is missing or has no JSON form, TooLargeError, and
    HopBrokenError.
    """
    response = parsed_answer(answer)
    outputs, binary, size = [], [], 0
    for name, tensor in _wanted(form, response).items():
        entry: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        if form.named.get(name, form.binary):
            entry["parameters"] = {BINARY_SIZE: len(tensor.data)}
            binary.append(tensor.data)
            size += len(tensor.data)
        else:
            text = _json(name, tensor)
            entry["data"] = orjson.Fragment(text)
            size += len(text)
        outputs.append(entry)
        _check_size(size)
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    if parameters := plain_parameters(response.parameters):
        head["parameters"] = parameters
    text = orjson.dumps(head | {"outputs": outputs})
    body = b"".join([text, *binary])
    _check_size(len(body))
    return len(text) if binary else None, body


def parsed_answer(answer: pb.ModelInferResponse | bytes) -> pb.ModelInferResponse:
    """The message of an answer, which may be serialized; raises BrokenAnswerError."""
    with predictor_answers():
        return pb.ModelInferResponse.FromString(answer) if isinstance(answer, bytes) else answer


def answered_tensors(response: pb.ModelInferResponse) -> dict[str, RawTensor]:
    """A response's outputs; raises BrokenAnswerError."""
    with predictor_answers():
        return raw_outputs(response)


def _check_extensions(tensor: NamedTensor) -> None:
    if tensor.parameter("shared_memory_region") is not None:
        raise InvalidRequestError(f"tensor {tensor.name!r}: shared memory is not supported; send tensors in the body")
    if tensor.parameter("classification"):
        raise InvalidRequestError(f"output {tensor.name!r}: the classification extension is not supported")


def _wanted(form: OutputForm, response: pb.ModelInferResponse) -> dict[str, RawTensor]:
    """The requested outputs in that order, or all outputs."""
    tensors = answered_tensors(response)
    check_names("output", form.named, tensors)
    return {name: tensors[name] for name in form.named} or tensors


def _json(name: str, tensor: RawTensor) -> bytes:
    # An element takes two bytes at least; so an answer that is too large is not written first.
    if tensor.datatype != BYTES:
        _check_size(2 * len(tensor.data) // dtype_of(name, tensor.datatype).itemsize)
    return json_of(name, tensor)


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise TooLargeError(f"the answer has {size} bytes or more, at most {MAX_BODY_BYTES} are passed on")


def _truth(value: Any, name: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false")
    return value


def is_small(data: bytes, max_bytes: int) -> bool:
    """Whether the body that was compressed has so many bytes at most, as far as that can be known."""
    if len(data) > max_bytes:
        return False
    try:
        return len(zlib.decompressobj().decompress(data, max_bytes + 1)) <= max_bytes
    except zlib.error:
        return True


def inflated(data: bytes) -> tuple[None, bytes]:
    """For `BodyProcesses`: the body that was compressed; raises InvalidRequestError, and TooLargeError."""
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not compressed by {DEFLATE}: {error}") from None
    if reader.unconsumed_tail:
        raise TooLargeError(f"the body has more than {MAX_BYTES} bytes")
    if not reader.eof or reader.unused_data:
        raise InvalidRequestError(f"the body is not compressed by {DEFLATE}: it does not end where its data does")
    return None, body
