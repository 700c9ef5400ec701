"""Predictors call by call, through Envoy's inner listener: probes, tensors, and generations of other servers.

Any server of the Open Inference Protocol can stand there: what it lacks of ours (health by the name `ready`,
ModelConfig) is requested in another way or done without. A generation there is one `ModelStreamInfer` call, so that
cancel, deadline and flow control are HTTP/2's own. Predictors of ours generate over links.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

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
from millrace.oip.tensors import Tensor, add_input, decode_outputs, dtype_of
from millrace.payload.call import RECORDED
from millrace.rpc.channel import open_channel
from millrace.rpc.client_interceptors import CallSpan
from millrace.rpc.server import READY
from millrace_protos import inference_pb2, inference_pb2_grpc
from millrace_protos.millrace_pb2 import Usage
from services.transformer.predictors.answers import numbers_of, predictor_answers
from services.transformer.predictors.descriptions import Dialect
from services.transformer.predictors.retries import Backoff
from services.transformer.predictors.tokens import Generation, TokenChunk

PROBE_TIMEOUT_S = 2.0
# Triton's own switch: an error ends the call with its status, not with a text inside the stream.
ERRORS_AS_STATUS = ("triton_grpc_error", "true")

_SERVICE = "/inference.GRPCInferenceService"
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_END_TIMEOUT_S = 1.0


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

    `wait_s` is how long a request waits for predictors that are away, `start_wait_s` one of which nothing has been
    answered yet.
    """

    def __init__(self, target: str, wait_s: float = 120.0, start_wait_s: float = 30.0) -> None:
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

    def generate(self, generation: Generation, deadline: Deadline, span: CallSpan) -> OipCall:
        """Begins the call; `span` receives its span."""
        return OipCall(self._stream, generation, deadline, span)


class OipCall:
    """A generation as one call at a server that is not ours. Such a call resumes nothing."""

    is_accepted = runs_alone = is_leaving = False
    fingerprint = ""

    def __init__(
        self,
        stream: grpc.aio.UnaryStreamMultiCallable[
            inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse
        ],
        generation: Generation,
        deadline: Deadline,
        span: CallSpan,
    ) -> None:
        request = inference_pb2.ModelInferRequest(model_name=generation.model, id=generation.request_id)
        add_input(request, _ids_tensor(INPUT_IDS, generation.prompt_ids, generation.dialect))
        set_parameters(request.parameters, generation.sampling.model_dump(exclude_none=True))
        with span.of_next_call():
            self._call = stream(request, timeout=deadline.left(), metadata=(ERRORS_AS_STATUS, RECORDED))
        self._messages = aiter(self._call)
        self._generation = generation
        self._span = span
        self._produced = 0

    async def read(self) -> TokenChunk:
        """The next tokens; raises MillraceError."""
        message = await anext(self._messages, None)
        if message is None:
            return self._last()
        self._span.message()
        if message.error_message:
            raise RequestFailedError(message.error_message, hop="predictor")
        with predictor_answers():
            chunk = _chunk(message.infer_response, decode_outputs(message.infer_response))
        self._produced += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            await self._until_end()
        return chunk

    def close(self) -> None:
        """Cancels the call unless it has ended."""
        self._call.cancel()

    def _last(self) -> TokenChunk:
        """The end of a server whose last answer has no finish_reason: its call has ended well."""
        generation = self._generation
        if generation.dialect.tells_reason:
            raise HopBrokenError("the predictor ended the stream before its last token", hop="predictor")
        reason = "length" if self._produced >= (generation.sampling.max_tokens or 0) else "stop"
        usage = Usage(prompt_tokens=len(generation.prompt_ids), completion_tokens=self._produced)
        return TokenChunk(finish_reason=reason, usage=usage)

    async def _until_end(self) -> None:
        """Reads the call's status, so that it ends as OK and not as cancelled; the answer does not depend on it."""
        with suppress(MillraceError, TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                async for _ in self._messages:
                    pass


def _ids_tensor(name: str, ids: Sequence[int], dialect: Dialect) -> Tensor:
    array = np.array(ids, dtype=dtype_of(name, dialect.datatype))
    return Tensor(name, dialect.datatype, array[None] if dialect.batched else array)


def _chunk(response: inference_pb2.ModelInferResponse, outputs: Mapping[str, Tensor]) -> TokenChunk:
    parameters = read_sampling(response.parameters)
    reason = parameters.get("finish_reason")
    usage = None
    if reason is not None:
        usage = Usage(**{name: int(parameters.get(name, 0)) for name in _USAGE})
    cached = parameters.get("cached_tokens")
    return TokenChunk(
        numbers_of(outputs, OUTPUT_IDS, "iu"),
        numbers_of(outputs, "logprobs", "f"),
        _top_logprobs(outputs),
        reason,
        usage,
        None if cached is None else int(cached),
    )


def _top_logprobs(outputs: Mapping[str, Tensor]) -> list[list[tuple[int, float]]]:
    """The likeliest (token id, log probability) at each position."""
    if not {"top_logprob_ids", "top_logprobs"} <= outputs.keys():
        return []
    ids, values = outputs["top_logprob_ids"].array.tolist(), outputs["top_logprobs"].array.tolist()
    return [list(zip(*position, strict=True)) for position in zip(ids, values, strict=True)]
