"""The predictors, through Envoy's inner listener, a call at a time; resuming.py makes one generation of several.

A generation is one `ModelStreamInfer` call, so that cancel, deadline and flow control are HTTP/2's own; through Envoy,
because one long-lived connection would pin every call to one replica. Any server of the protocol can stand there: what
it lacks of ours (health by the name `ready`, ModelConfig, heartbeats) is asked in another way or done without.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.deadline import Deadline
from millrace.errors import (
    DeadlineError,
    HopBrokenError,
    MillraceError,
    NotFoundError,
    NotImplementedMethodError,
    NotReadyError,
    RequestFailedError,
)
from millrace.oip.model_description import INPUT_IDS, OUTPUT_IDS
from millrace.oip.parameters import read_sampling, set_parameters
from millrace.oip.prompt_logprobs import PROMPT_LOGPROBS, PromptLogprobs
from millrace.oip.resumable import FINGERPRINT, LEAVING, RUNS_ALONE, SPAN, CallOptions
from millrace.oip.tensors import Tensor, add_input, decode_outputs, dtype_of
from millrace.payload.call import RECORDED
from millrace.rpc.channel import open_channel
from millrace.rpc.client_interceptors import CallSpan
from millrace.rpc.server import READY
from millrace.sampling import SamplingParameters
from millrace_protos import inference_pb2, inference_pb2_grpc
from millrace_protos.millrace_pb2 import Usage
from services.transformer.predictors.answers import numbers_of, predictor_answers
from services.transformer.predictors.descriptions import OURS, Dialect
from services.transformer.predictors.retries import Backoff

PROBE_TIMEOUT_S = 2.0
# Triton's own switch: an error ends the call with its status, not with a text inside the stream.
ERRORS_AS_STATUS = ("triton_grpc_error", "true")

_SERVICE = "/inference.GRPCInferenceService"
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_END_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Generation:
    """A generation, however many calls it takes; `resumes`: a call can resume after the ids of an earlier one.

    `prompt_logprobs` requests log probabilities of the prompt too, see millrace/oip/prompt_logprobs.py.
    """

    model: str
    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParameters
    dialect: Dialect = OURS
    resumes: bool = True
    prompt_logprobs: int | None = None


@dataclass
class TokenChunk:
    """New token ids, with log probabilities (see TextChunk) where asked for; the last one ends the generation.

    `cached_tokens` is the number of prompt tokens that needed no computation, if this chunk has it. A chunk with
    neither ids nor a reason is a heartbeat; with `runs_alone`, the predictor computes nothing else from now on.
    `prompt` is in the first chunk with tokens, if requested. `fingerprint`, of the weights, is in the first chunk of a
    call, even a heartbeat. With `is_leaving` the predictor is about to stop. `resumed` marks the first chunk of a call
    that resumed the answer.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str | None
    usage: Usage | None
    cached_tokens: int | None = None
    runs_alone: bool = False
    fingerprint: str = ""
    is_leaving: bool = False
    prompt: PromptLogprobs | None = None
    resumed: bool = False


@contextmanager
def probe_errors() -> Iterator[None]:
    """Of a call about a model, whose timeout is ours and not the caller's: when it passes the predictor is not
    ready."""
    try:
        yield
    except DeadlineError:
        raise NotReadyError("the predictor does not answer", hop="predictor") from None


class PredictorClient:
    """Every method raises MillraceError signed with the hop that failed.

    A predictor of ours that says nothing for `silence_limit_s` counts as away where it has not answered the call yet,
    else as dead; `wait_s` is how long a request waits for predictors that are away, `start_wait_s` one of which nothing
    has been answered yet.
    """

    def __init__(
        self, target: str, silence_limit_s: float = 10.0, wait_s: float = 120.0, start_wait_s: float = 30.0
    ) -> None:
        self.silence_limit_s = silence_limit_s
        self._wait_s = wait_s
        self._start_wait_s = start_wait_s
        self._channel = open_channel(target, "predictor")
        self.inference = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # One request a call, sent with the half-close. As a stream of requests grpc.aio may still be writing when the
        # predictor refuses, and then loses the refusal's status (grpc/grpc#36066).
        self._stream: grpc.aio.UnaryStreamMultiCallable[
            inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse
        ] = self._channel.unary_stream(
            f"{_SERVICE}/ModelStreamInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
        )
        # Without serializers: messages as the bytes they are on the wire.
        self.infer_bytes: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"{_SERVICE}/ModelInfer"
        )
        self.stream_bytes: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"{_SERVICE}/ModelStreamInfer"
        )

    async def close(self) -> None:
        await self._channel.close()

    def backoff(self, deadline: Deadline) -> Backoff:
        """The retries of a request."""
        return Backoff(deadline, self._wait_s, self._start_wait_s)

    async def ready(self) -> bool:
        """Whether a predictor says that a generation would work now."""
        request = health_pb2.HealthCheckRequest(service=READY)
        try:
            response = await self._health.Check(request, timeout=PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
            return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
        except (NotFoundError, NotImplementedMethodError):
            return await self._server_ready()
        except MillraceError:
            return False

    async def _server_ready(self) -> bool:
        try:
            answer = await self.inference.ServerReady(inference_pb2.ServerReadyRequest(), timeout=PROBE_TIMEOUT_S)
        except MillraceError:
            return False
        return answer.ready

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a predictor says that a model can be called now."""
        request = inference_pb2.ModelReadyRequest(name=name, version=version)
        try:
            return (await self.inference.ModelReady(request, timeout=PROBE_TIMEOUT_S)).ready
        except MillraceError:
            return False

    async def generate(
        self,
        generation: Generation,
        output_ids: Sequence[int],
        options: CallOptions,
        deadline: Deadline,
        span: CallSpan | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one call, which goes on after `output_ids`; closing the generator cancels it at the predictor.

        `span` receives the call's span.
        """
        span = span or CallSpan()
        request = inference_pb2.ModelInferRequest(model_name=generation.model, id=generation.request_id)
        add_input(request, _ids_tensor(INPUT_IDS, generation.prompt_ids, generation.dialect))
        if output_ids:
            add_input(request, _ids_tensor(OUTPUT_IDS, output_ids, generation.dialect))
        set_parameters(request.parameters, generation.sampling.model_dump(exclude_none=True))
        # A call that goes on after earlier ids follows one whose first chunk had them.
        scored = None if output_ids else generation.prompt_logprobs
        set_parameters(request.parameters, {PROMPT_LOGPROBS: scored})
        metadata = (ERRORS_AS_STATUS, RECORDED, *options.metadata())
        silence_limit_s = None if options.heartbeat_ms is None else self.silence_limit_s
        produced = 0
        silent: MillraceError = NotReadyError("the predictor does not answer", hop="predictor")
        with span.of_next_call():
            call = self._stream(request, timeout=deadline.left(), metadata=metadata)
        try:
            async with aclosing(_chunks(call, span, len(generation.prompt_ids), scored)) as chunks:
                while (chunk := await _unless_silent(chunks, silence_limit_s, silent)) is not None:
                    silent = HopBrokenError("the predictor fell silent", hop="predictor")
                    produced += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish_reason is not None:
                        await _until_end(chunks)
                        return
            if generation.dialect.tells_reason:
                raise HopBrokenError("the predictor ended the stream before its last token", hop="predictor")
            reason = "length" if produced >= (generation.sampling.max_tokens or 0) else "stop"
            usage = Usage(prompt_tokens=len(generation.prompt_ids), completion_tokens=produced)
            yield TokenChunk([], [], [], reason, usage)
        finally:
            call.cancel()


async def _unless_silent(
    chunks: AsyncIterator[TokenChunk], limit_s: float | None, silent: MillraceError
) -> TokenChunk | None:
    """The next chunk, None after the last; raises `silent` where none comes within the limit."""
    try:
        async with asyncio.timeout(limit_s):
            return await anext(chunks, None)
    except TimeoutError:
        raise silent from None


def _ids_tensor(name: str, ids: Sequence[int], dialect: Dialect) -> Tensor:
    array = np.array(ids, dtype=dtype_of(name, dialect.datatype))
    return Tensor(name, dialect.datatype, array[None] if dialect.batched else array)


async def _until_end(chunks: AsyncIterator[TokenChunk]) -> None:
    """Reads the call's status, so that it ends as OK and not as cancelled; the answer does not depend on it."""
    with suppress(MillraceError, TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in chunks:
                pass


async def _chunks(
    call: grpc.aio.UnaryStreamCall[inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse],
    span: CallSpan,
    prompt_tokens: int,
    scored: int | None,
) -> AsyncGenerator[TokenChunk, None]:
    """The call's chunks; the first with tokens has the prompt's log probabilities unless `scored` is None."""
    async for message in call:
        span.message()
        if message.error_message:
            raise RequestFailedError(message.error_message, hop="predictor")
        with predictor_answers():
            outputs = decode_outputs(message.infer_response)
            chunk = _chunk(message.infer_response, outputs, span)
            if scored is not None and chunk.token_ids:
                chunk.prompt = PromptLogprobs.read(outputs, prompt_tokens, scored)
                scored = None
        yield chunk


def _chunk(response: inference_pb2.ModelInferResponse, outputs: Mapping[str, Tensor], span: CallSpan) -> TokenChunk:
    parameters = read_sampling(response.parameters)
    if SPAN in parameters:
        span.answered_by = str(parameters[SPAN])
    reason = parameters.get("finish_reason")
    usage = None
    if reason is not None:
        usage = Usage(**{name: int(parameters.get(name, 0)) for name in _USAGE})
    token_ids, logprobs = numbers_of(outputs, OUTPUT_IDS, "iu"), numbers_of(outputs, "logprobs", "f")
    cached = parameters.get("cached_tokens")
    cached_tokens = None if cached is None else int(cached)
    runs_alone = RUNS_ALONE in parameters
    fingerprint = str(parameters.get(FINGERPRINT, ""))
    top = _top_logprobs(outputs)
    return TokenChunk(
        token_ids, logprobs, top, reason, usage, cached_tokens, runs_alone, fingerprint, LEAVING in parameters
    )


def _top_logprobs(outputs: Mapping[str, Tensor]) -> list[list[tuple[int, float]]]:
    """The likeliest (token id, log probability) at each position."""
    if not {"top_logprob_ids", "top_logprobs"} <= outputs.keys():
        return []
    ids, values = outputs["top_logprob_ids"].array.tolist(), outputs["top_logprobs"].array.tolist()
    return [list(zip(*position, strict=True)) for position in zip(ids, values, strict=True)]
