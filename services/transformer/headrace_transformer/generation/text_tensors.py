"""Text models as tensors, with the names of Triton's vLLM backend.

Inputs, each of one element: `text_input` BYTES; optional `stream` BOOL, `sampling_parameters` BYTES (JSON),
`exclude_input_in_output` BOOL (default true), and `return_finish_reason`, `return_cumulative_logprob`,
`return_logprobs`, `return_num_input_tokens`, `return_num_output_tokens` BOOL, each by default whether the request names
that output. Sampling parameters are read from the request's `parameters` too, which win; `logprobs` may be a number, as
vLLM has it: so many of the likeliest tokens at each position.

Outputs, each [1]: `text_output` BYTES; where asked for, in every response, `finish_reason` BYTES ("None" before the
end), `cumulative_logprob` FP32, `logprobs` BYTES (JSON: for each new token an object of token id to logprob, rank and
decoded_token), `num_input_tokens` and `num_output_tokens` UINT32 (the response's own).

Source of the names: triton-inference-server/vllm_backend, docs/additional_outputs.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace.errors import InvalidRequestError
from headrace.oip.model_description import (
    FINGERPRINT,
    ModelDescription,
    TensorSpec,
    check_names,
    check_requested_outputs,
)
from headrace.oip.parameters import read_sampling, set_parameters
from headrace.oip.tensors import BYTES, Tensor, add_output, bytes_tensor, decode_inputs
from headrace.rpc.server.call_context import CallContext
from headrace_protos import inference_pb2 as pb
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.models.models import TextModel

TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
_FINISH_REASON, _CUMULATIVE, _LOGPROBS = "finish_reason", "cumulative_logprob", "logprobs"
_INPUT_TOKENS, _OUTPUT_TOKENS = "num_input_tokens", "num_output_tokens"
_OUTPUTS = {
    TEXT_OUTPUT: BYTES,
    _FINISH_REASON: BYTES,
    _CUMULATIVE: "FP32",
    _LOGPROBS: BYTES,
    _INPUT_TOKENS: "UINT32",
    _OUTPUT_TOKENS: "UINT32",
}
_INPUTS = {
    TEXT_INPUT: BYTES,
    "stream": "BOOL",
    "sampling_parameters": BYTES,
    "exclude_input_in_output": "BOOL",
    **{f"return_{name}": "BOOL" for name in _OUTPUTS if name != TEXT_OUTPUT},
}
_PLATFORM = "headrace_text"
# A larger request cannot be one to a text model, and reading it would delay other requests.
_MAX_TENSORS, _MAX_PARAMETERS, _MAX_DIMENSIONS = 64, 256, 32
_MAX_SAMPLING_BYTES = 128 * 1024


@dataclass(frozen=True)
class TextCall:
    """A parsed request: the generation, and the form of its answer."""

    text: TextRequest
    stream: bool
    echo: str  # Text before the answer: the prompt or nothing.
    wanted: frozenset[str]  # Outputs beside the text.


def read_request(request: pb.ModelInferRequest, call: CallContext) -> TextCall:
    """Everything that can be refused without the model is refused here; raises InvalidRequestError."""
    _check(request)
    tensors = decode_inputs(request)
    prompt = _text(tensors[TEXT_INPUT])
    sampling = _sampling_object(tensors.get("sampling_parameters")) | read_sampling(request.parameters)
    named = {output.name for output in request.outputs}
    wanted = frozenset(name for name in _OUTPUTS if _flag(tensors.get(f"return_{name}"), default=name in named))
    _read_logprobs(sampling, wanted)
    text = TextRequest(
        call=call,
        model=request.model_name,
        version=request.model_version,
        prompt=prompt,
        stop=_texts("stop", sampling.pop("stop", None)),
        bad_words=_texts("bad_words", sampling.pop("bad_words", None)),
        sampling=sampling,
    )
    exclude = _flag(tensors.get("exclude_input_in_output"), default=True)
    return TextCall(text, _flag(tensors.get("stream"), default=True), "" if exclude else prompt, wanted)


class TextAnswer:
    """Writes the responses to one request."""

    def __init__(self, request: pb.ModelInferRequest, call: TextCall) -> None:
        self._request = request
        self._call = call
        self._cumulative = 0.0
        self._echo = call.echo

    def response(self, chunk: TextChunk) -> pb.ModelInferResponse:
        """One chunk as a response; the first one begins with the prompt where that is asked for."""
        request = self._request
        version = chunk.origin.model.versions[-1]
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=version, id=request.id)
        text, self._echo = self._echo + chunk.text, ""
        add_output(response, bytes_tensor(TEXT_OUTPUT, [text.encode()]))
        for tensor in self._further(chunk):
            add_output(response, tensor)
        if chunk.end is not None:
            set_parameters(response.parameters, {"finish_reason": chunk.end.reason})
        return response

    def _further(self, chunk: TextChunk) -> Iterator[Tensor]:
        self._cumulative += sum(chunk.tokens.logprobs)
        wanted = self._call.wanted
        if _FINISH_REASON in wanted:
            yield bytes_tensor(_FINISH_REASON, [str(chunk.end and chunk.end.reason).encode()])
        if _CUMULATIVE in wanted:
            yield Tensor(_CUMULATIVE, "FP32", np.array([self._cumulative], dtype=np.float32))
        if _LOGPROBS in wanted:
            text_of = chunk.origin.model.tokenizer.text_of
            ranked = [one.ranked(lambda token_id: text_of([token_id])) for one in chunk.scored]
            yield bytes_tensor(_LOGPROBS, [orjson.dumps(ranked)])
        if _INPUT_TOKENS in wanted:
            yield Tensor(_INPUT_TOKENS, "UINT32", np.array([len(chunk.origin.prompt_ids)], dtype=np.uint32))
        if _OUTPUT_TOKENS in wanted:
            yield Tensor(_OUTPUT_TOKENS, "UINT32", np.array([len(chunk.tokens.token_ids)], dtype=np.uint32))


def describe(model: TextModel) -> ModelDescription:
    """The description for ModelMetadata and ModelConfig."""
    parameters = {
        "context_length": str(model.limits.context_length),
        "chat_template": str(model.tokenizer.has_chat_template).lower(),
        **model.facts,
    }
    if model.fingerprint:
        parameters[FINGERPRINT] = model.fingerprint
    return ModelDescription(
        _PLATFORM,
        [TensorSpec(name, datatype, [1], optional=name != TEXT_INPUT) for name, datatype in _INPUTS.items()],
        [TensorSpec(name, datatype, [1]) for name, datatype in _OUTPUTS.items()],
        decoupled=True,
        parameters=parameters,
    )


def _check(request: pb.ModelInferRequest) -> None:
    """Refuses tensors by their descriptions, so that none is decoded that is too large."""
    if len(request.inputs) > _MAX_TENSORS or len(request.outputs) > _MAX_TENSORS:
        raise InvalidRequestError(f"more than {_MAX_TENSORS} tensors; a text model takes {', '.join(_INPUTS)}")
    if len(request.parameters) > _MAX_PARAMETERS:
        raise InvalidRequestError(f"{len(request.parameters)} parameters, at most {_MAX_PARAMETERS} are allowed")
    check_names("input", (tensor.name for tensor in request.inputs), _INPUTS)
    check_names("output", (output.name for output in request.outputs), _OUTPUTS)
    for tensor in request.inputs:
        if len(tensor.shape) <= _MAX_DIMENSIONS and (elements := math.prod(tensor.shape)) != 1:
            raise InvalidRequestError(f"{tensor.name} must hold one element, not {elements}")
        if tensor.datatype != _INPUTS[tensor.name]:
            raise InvalidRequestError(f"{tensor.name} must be {_INPUTS[tensor.name]}, not {tensor.datatype[:64]}")
    check_requested_outputs(request)
    if all(tensor.name != TEXT_INPUT for tensor in request.inputs):
        raise InvalidRequestError(f"input {TEXT_INPUT!r} is missing")


def _read_logprobs(sampling: dict[str, Any], wanted: frozenset[str]) -> None:
    """vLLM's `logprobs` is the number of likeliest tokens; ours is a boolean."""
    given = sampling.get(_LOGPROBS)
    count = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 10 else given
    if isinstance(count, int) and not isinstance(count, bool):
        sampling[_LOGPROBS] = True
        sampling.setdefault("top_logprobs", count)
    elif wanted & {_CUMULATIVE, _LOGPROBS}:
        sampling[_LOGPROBS] = True


def _sampling_object(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    if len(tensor.array.ravel()[0]) > _MAX_SAMPLING_BYTES:
        raise InvalidRequestError(f"sampling_parameters has more than {_MAX_SAMPLING_BYTES} bytes")
    text = _text(tensor)
    if not text:
        return {}
    try:
        values = orjson.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("sampling_parameters must be a JSON object")
    return values


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A text or texts."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise InvalidRequestError(f"{name} must be a string or a list of strings", param=name)
    return tuple(values)


def _text(tensor: Tensor) -> str:
    try:
        return str(tensor.array.ravel()[0], "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{tensor.name} is not UTF-8") from None


def _flag(tensor: Tensor | None, default: bool) -> bool:
    return default if tensor is None else bool(tensor.array.ravel()[0])
