"""Converts OIP tensors and submissions (headrace_protos/steps.proto) to generation requests, and chunks to responses.

Inputs: `input_ids` INT64 or INT32, [N] or [1, N]; optional `output_ids` of the same types, tokens that were generated
before. Sampling parameters are in `parameters`. Outputs of each response: `output_ids` INT32 [k]; on request `logprobs`
FP32 [k] and, for the n likeliest tokens at each position in descending order, `top_logprob_ids` INT32 [k, n] and
`top_logprobs` FP32 [k, n]. The last response's parameters contain `finish_reason`, `prompt_tokens`, `cached_tokens` and
`completion_tokens`. For the outputs of the parameter `prompt_logprobs` see headrace/oip/prompt_scores.py.
"""

import math
import uuid
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from pydantic_core import from_json

from headrace.clients import ANYONE, Client
from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace.grammars import PARAMETER
from headrace.oip.model_description import INPUT_IDS, OUTPUT_IDS, check_names
from headrace.oip.parameters import read_sampling, set_parameters
from headrace.oip.prompt_scores import OUTPUTS as PROMPT_OUTPUTS
from headrace.oip.prompt_scores import PROMPT_LOGPROBS, check_size
from headrace.oip.tensors import Tensor, add_output, checked_shape, decode_inputs
from headrace.sampling import MAX_TOP_LOGPROBS, SamplingParameters
from headrace.structured_outputs import Form
from headrace_predictor.engine.interface import Chunk, EngineLimits
from headrace_predictor.generation.loaded_model import Engine, LoadedModel
from headrace_predictor.models.served_model import ANY_CALLER, VERSION, Caller
from headrace_protos import inference_pb2
from headrace_protos.steps_pb2 import Submission

LOGPROBS = "logprobs"
TOP_LOGPROB_IDS = "top_logprob_ids"
TOP_LOGPROBS = "top_logprobs"
_CACHE_SALT = "cache_salt"
OUTPUTS = (OUTPUT_IDS, LOGPROBS, TOP_LOGPROB_IDS, TOP_LOGPROBS)
_SCORED = frozenset(PROMPT_OUTPUTS)


def read_request(
    model: LoadedModel[Engine], request: inference_pb2.ModelInferRequest, caller: Caller = ANY_CALLER
) -> Submission:
    """Validates a request completely, so that the engine never sees an invalid one."""
    _check_lengths(request, model.engine.limits)
    tensors = decode_inputs(request)
    check_names("input", tensors, (INPUT_IDS, OUTPUT_IDS))
    limits = model.engine.limits
    check_names("output", (output.name for output in request.outputs), outputs_of(limits))
    if INPUT_IDS not in tensors:
        raise InvalidRequestError("input 'input_ids' is missing")
    input_ids = _ids(tensors[INPUT_IDS], limits)
    _check_prompt(input_ids, limits)
    output_ids = _ids(tensors[OUTPUT_IDS], limits) if OUTPUT_IDS in tensors else []
    parameters = read_sampling(request.parameters)
    names = {output.name for output in request.outputs}
    prompt_logprobs = _prompt_logprobs(parameters.pop(PROMPT_LOGPROBS, None), len(input_ids), limits)
    if names & _SCORED and prompt_logprobs is None:
        raise InvalidRequestError(f"outputs {', '.join(PROMPT_OUTPUTS)} need the parameter {PROMPT_LOGPROBS}")
    if names - {OUTPUT_IDS} - _SCORED:
        parameters["logprobs"] = True
    sampling = _sampling(model, parameters, len(input_ids), len(output_ids))
    if names & {TOP_LOGPROB_IDS, TOP_LOGPROBS} and not sampling.top_logprobs:
        raise InvalidRequestError("outputs 'top_logprob_ids' and 'top_logprobs' need the parameter top_logprobs")
    return Submission(
        request_id=request.id or str(uuid.uuid4()),
        prompt_ids=input_ids,
        sampling=_sampling_json(sampling),
        output_ids=output_ids,
        deadline=caller.deadline.at,
        first_token_timeout_s=caller.first_token_timeout_s,
        prompt_logprobs=prompt_logprobs,
        client=caller.client.name,
        weight=caller.client.policy.weight,
        adapter=model.adapter,
    )


def complete(model: LoadedModel[Engine], submission: Submission, channel: int, deadline: Deadline) -> Submission:
    """Validates a transformer's submission as `read_request` does; returns what the engine needs besides.

    Any client may send output_ids; a transformer states with them that its caller already has part of the answer.
    """
    limits = model.engine.limits
    input_ids, output_ids = list(submission.prompt_ids), list(submission.output_ids)
    _check_prompt(input_ids, limits)
    for name, ids in ((INPUT_IDS, input_ids), (OUTPUT_IDS, output_ids)):
        _check_ids(name, ids, limits)
    try:
        parameters = from_json(submission.sampling or b"{}")
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidRequestError("sampling must be a JSON object")
    if submission.HasField("weight") and not 0 < submission.weight < math.inf:
        raise InvalidRequestError(f"weight must be positive, not {submission.weight:g}")
    if submission.HasField("prompt_logprobs"):
        _prompt_logprobs(submission.prompt_logprobs, len(input_ids), limits)
    if isinstance(form := parameters.get(PARAMETER), str):
        parameters[PARAMETER] = Form(form)  # The transformer has read it.
    sampling = _sampling(model, parameters, len(input_ids), len(output_ids))
    return Submission(sampling=_sampling_json(sampling), channel=channel, deadline=deadline.at, adapter=model.adapter)


def outputs_of(limits: EngineLimits) -> tuple[str, ...]:
    """The names of the outputs that a model's responses can have."""
    return OUTPUTS + PROMPT_OUTPUTS if limits.scores_prompts else OUTPUTS


def write_response(
    request: inference_pb2.ModelInferRequest, chunk: Chunk, client: Client = ANYONE
) -> inference_pb2.ModelInferResponse:
    """Converts a chunk to a response to `request`.

    The number of cached prompt tokens goes only to clients with a name and to requests with a cache_salt, which share
    their cache with no other: otherwise a caller could find out which prompts others have sent.
    """
    response = inference_pb2.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    names = {output.name for output in request.outputs} or {*OUTPUTS, *PROMPT_OUTPUTS}
    if OUTPUT_IDS in names:
        add_output(response, Tensor(OUTPUT_IDS, "INT32", np.array(chunk.output_ids, dtype=np.int32)))
    if LOGPROBS in names and chunk.logprobs:
        chosen = [position.chosen for position in chunk.logprobs]
        add_output(response, Tensor(LOGPROBS, "FP32", np.array(chosen, dtype=np.float32)))
    if chunk.logprobs and chunk.logprobs[0].top:
        # Ids and log probabilities, [k, n, 2]; float64 represents both exactly.
        top = np.array([position.top for position in chunk.logprobs])
        if TOP_LOGPROB_IDS in names:
            add_output(response, Tensor(TOP_LOGPROB_IDS, "INT32", top[:, :, 0].astype(np.int32)))
        if TOP_LOGPROBS in names:
            add_output(response, Tensor(TOP_LOGPROBS, "FP32", top[:, :, 1].astype(np.float32)))
    if chunk.prompt is not None:
        for tensor in chunk.prompt.tensors():
            if tensor.name in names:
                add_output(response, tensor)
    if chunk.finish_reason is not None:
        set_parameters(response.parameters, {"finish_reason": chunk.finish_reason})
    if chunk.usage is not None:
        usage = dict(vars(chunk.usage))
        is_salted = _CACHE_SALT in request.parameters and request.parameters[_CACHE_SALT].string_param
        if not (is_salted or client.name):
            usage["cached_tokens"] = 0
        set_parameters(response.parameters, usage)
    return response


def merged(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        [token for chunk in chunks for token in chunk.output_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks[-1].finish_reason,
        chunks[-1].usage,
        chunks[0].prompt,
    )


def _check_prompt(input_ids: list[int], limits: EngineLimits) -> None:
    if not input_ids:
        raise InvalidRequestError("the prompt is empty")
    if len(input_ids) > limits.context_length:
        raise InvalidRequestError(f"the prompt has {len(input_ids)} tokens, the context is {limits.context_length}")


def _sampling(
    model: LoadedModel[Engine], parameters: dict[str, Any], prompt_tokens: int, output_tokens: int
) -> SamplingParameters:
    """The complete parameters of a request, with the model's defaults."""
    limits = model.limits
    sampling = model.defaults.changed(parameters).resolved(
        limits.room(prompt_tokens), limits.default_tokens(prompt_tokens)
    )
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits)
    if sampling.has_restrictions:
        _check_ids("logit_bias", list(sampling.logit_bias), limits)
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, limits)
        _check_ids("bad_token_ids", list(chain.from_iterable(sampling.bad_token_ids)), limits)
    # max_tokens tokens, or fewer with an end token last, are a complete answer of which only the end was lost.
    if output_tokens > (sampling.max_tokens or 0):
        raise InvalidRequestError(f"output_ids has {output_tokens} tokens, max_tokens is {sampling.max_tokens}")
    return sampling


def _sampling_json(sampling: SamplingParameters) -> bytes:
    return sampling.model_dump_json(exclude_defaults=True).encode()


def _prompt_logprobs(value: Any, prompt_tokens: int, limits: EngineLimits) -> int | None:
    """The number of likeliest tokens requested at each prompt position; None: no prompt log probabilities."""
    if value is None:
        return None
    if not limits.scores_prompts:
        raise InvalidRequestError("the model has no log probabilities of prompts", param=PROMPT_LOGPROBS)
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"{PROMPT_LOGPROBS} must be from 0 to {MAX_TOP_LOGPROBS}", param=PROMPT_LOGPROBS)
    check_size(prompt_tokens, value)
    return value


def _check_lengths(request: inference_pb2.ModelInferRequest, limits: EngineLimits) -> None:
    """Refuses inputs longer than the context before their ids are decoded, which would take long."""
    for tensor in request.inputs:
        length = math.prod(checked_shape(tensor.name, tensor.shape))
        if length > limits.context_length:
            subject = "the prompt" if tensor.name == INPUT_IDS else tensor.name
            raise InvalidRequestError(f"{subject} has {length} tokens, the context is {limits.context_length}")


def _ids(tensor: Tensor, limits: EngineLimits) -> list[int]:
    if tensor.datatype not in ("INT64", "INT32"):
        raise InvalidRequestError(f"{tensor.name} must be INT64 or INT32, not {tensor.datatype}")
    shape = tensor.array.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        raise InvalidRequestError(f"{tensor.name} must have shape [N] or [1, N], not {list(shape)}")
    ids: list[int] = tensor.array.ravel().tolist()
    _check_ids(tensor.name, ids, limits)
    return ids


def _check_ids(name: str, ids: Sequence[int], limits: EngineLimits) -> None:
    size = limits.vocabulary_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        outside = next(token_id for token_id in ids if not 0 <= token_id < size)
        raise InvalidRequestError(f"{name}: token id {outside} is outside of 0 to {size - 1}")
