"""`headrace.v1.TextGeneration`: text in, a stream of text out; and the same by REST, with a JSON request.

Beside it `headrace.v1.Development`, which kills the predictor that generates for a request: for demonstrations, and
only if the settings allow it. It asks the replicas in turn, each by its own address, and stops at the first that has
the request and so kills itself. Several replicas may have it (several choices, a hedged request); the others continue.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from itertools import islice
from typing import Any

from google.api.httpbody_pb2 import HttpBody

from headrace.errors import HeadraceError, NotFoundError
from headrace.rpc import Context
from headrace.rpc.server.call_context import DEVELOPMENT, CallContext, call_context, check_development, check_request_id
from headrace.rpc.server.handlers import errors_in_band
from headrace.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS, MAX_BIASES, MAX_STOP_TOKEN_IDS
from headrace.telemetry.identity import REQUEST_ID_METADATA, as_metadata
from headrace_protos import headrace_pb2 as pb
from headrace_protos import headrace_pb2_grpc, rest_pb2_grpc
from headrace_transformer.frontends.grpc.generate_json import MAX_BODY_BYTES, read_generate_request, read_large
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.requests import TextRequest, check_bad_words, check_message_count, check_stop_count
from headrace_transformer.generation.resume_ids import ResumeIds, identity_of
from headrace_transformer.predictors.discovery.replicas import Replicas
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses

_TTFT_MS = "x-ttft-ms"
_PROTOCOL = "headrace.v1.TextGeneration/Generate"
_REST_PROTOCOL = "headrace.rest.v1.TextGeneration/Generate"
_NOT_SAMPLING = {"model", "prompt", "messages", "prompt_ids", "stop", "bad_words", "request_id", "resume_from"}


class TextGenerationServicer(headrace_pb2_grpc.TextGenerationServicer):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = call_context(context, _PROTOCOL, request.request_id)
        async with aclosing(self.generate(request, call, context)) as responses:
            async for response in responses:
                yield response

    async def generate(
        self, request: pb.GenerateRequest, call: CallContext, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The responses to a request; raises HeadraceError."""
        request_id = call.request_id
        context.set_trailing_metadata(((REQUEST_ID_METADATA, as_metadata(request_id)),))
        with self._pipeline.recording_refusals(call, request.model):
            check_request_id(request.request_id)
            check_message_count(len(request.messages))
            check_stop_count(len(request.stop))
            check_bad_words(request.bad_words)
            body = _body(request)
            signer = self._pipeline.signer
            identity = await identity_of(call, body, request.resume_from, signer=signer, has_ids=bool(body))
        text_request = TextRequest(
            call=call,
            model=request.model,
            prompt=request.prompt if request.HasField("prompt") else None,
            prompt_ids=request.prompt_ids or None,
            messages=[(message.role, message.content) for message in request.messages],
            sampling=_sampling(request),
            stop=tuple(request.stop),
            bad_words=tuple(request.bad_words),
            default_seed=identity.seed,
            resume=identity.resume,
        )
        ids, first = ResumeIds(identity), True
        async with aclosing(self._pipeline.generate(text_request)) as chunks:
            async for chunk in chunks:
                if first:
                    first = False
                    ttft = (_TTFT_MS, f"{chunk.elapsed_s * 1000:.1f}")
                    context.set_trailing_metadata(((REQUEST_ID_METADATA, as_metadata(request_id)), ttft))
                ids.take(chunk.tokens.fingerprint, chunk.tokens.token_ids)
                if not chunk.tokens.repeated:
                    yield _response(chunk, ids.id("" if chunk.end is None else "f"))


class RestTextGenerationServicer(rest_pb2_grpc.TextGenerationServicer):
    """Reads the JSON of requests for `servicer`."""

    def __init__(self, pipeline: Pipeline, servicer: TextGenerationServicer, bodies: BodyProcesses) -> None:
        self._pipeline = pipeline
        self._servicer = servicer
        self._bodies = bodies

    @errors_in_band(pb.GenerateResponse)
    async def Generate(self, request: HttpBody, context: Context) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = call_context(context, _REST_PROTOCOL)
        with self._pipeline.recording_refusals(call):
            message = await self._read(request.data, call)
        call = call.with_id(message.request_id)
        async with aclosing(self._servicer.generate(message, call, context)) as responses:
            async for response in responses:
                yield response

    async def _read(self, data: bytes, call: CallContext) -> pb.GenerateRequest:
        if not SMALL_BYTES < len(data) <= MAX_BODY_BYTES:
            return read_generate_request(data)
        _, message = await self._bodies.run(read_large, (), data, call.deadline)
        return pb.GenerateRequest.FromString(message)


def _sampling(request: pb.GenerateRequest) -> dict[str, Any]:
    """The sampling parameters that the request sets: every scalar is optional."""
    given = {field.name: value for field, value in request.ListFields() if field.name not in _NOT_SAMPLING}
    # One more than the maximum is enough for the refusal.
    for name, limit in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)):
        if name in given:
            given[name] = list(given[name][: limit + 1])
    if request.logit_bias:
        given["logit_bias"] = dict(islice(request.logit_bias.items(), MAX_BIASES + 1))
    if request.bad_token_ids:
        given["bad_token_ids"] = [
            list(one.ids[: MAX_BAD_TOKENS + 1]) for one in request.bad_token_ids[: MAX_BAD_SEQUENCES + 1]
        ]
    return given


def _body(request: pb.GenerateRequest) -> bytes:
    """What two requests for the same answer have in common; empty for a request that is larger than any prompt."""
    if request.ByteSize() > MAX_BODY_BYTES:
        return b""
    common = pb.GenerateRequest()
    common.CopyFrom(request)
    common.ClearField("request_id")
    common.ClearField("resume_from")
    return common.SerializeToString(deterministic=True)


def _response(chunk: TextChunk, resume_id: str) -> pb.GenerateResponse:
    tokens = chunk.tokens
    response = pb.GenerateResponse(text=chunk.text, token_ids=tokens.token_ids, logprobs=tokens.logprobs)
    for top in tokens.top_logprobs:
        response.top_logprobs.add(token_ids=[token_id for token_id, _ in top], logprobs=[value for _, value in top])
    if tokens.predictor:
        response.predictor = tokens.predictor
    if resume_id:
        response.resume_id = resume_id
    if chunk.end is not None:
        response.finish_reason = chunk.end.reason
        response.usage.CopyFrom(chunk.end.usage)
    return response


_TIMEOUT_S = 2.0  # Of all replicas together.


class DevelopmentServicer(headrace_pb2_grpc.DevelopmentServicer):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def KillPredictor(self, request: pb.KillPredictorRequest, context: Context) -> pb.KillPredictorResponse:
        check_development(context)
        channels, ends_at = await self._replicas.channels(), time.monotonic() + _TIMEOUT_S
        for index, channel in enumerate(channels):
            # One that does not answer has none, and leaves time for those after it.
            timeout_s = (ends_at - time.monotonic()) / (len(channels) - index)
            predictor = headrace_pb2_grpc.PredictorDevelopmentStub(channel)
            with suppress(HeadraceError):
                await predictor.Kill(request, timeout=timeout_s, metadata=(DEVELOPMENT,))
                return pb.KillPredictorResponse()
        raise NotFoundError(f"no predictor generates for the request {request.request_id!r}")
