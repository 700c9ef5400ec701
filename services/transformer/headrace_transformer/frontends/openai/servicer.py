"""OpenAI's API: models, completions, chat completions and embeddings; and vLLM's paths beyond it.

`stream: true` answers with server-sent events that end in `data: [DONE]`; the chunks of all choices are interleaved as
they arrive. Each choice is one generation, with its own record under the request's id. Served by HTTP: http_methods.py.
Source: OpenAI's API reference for the shapes of answers, chunks and errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from headrace import __version__
from headrace.clients import client_of
from headrace.errors import NotReadyError
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.rpc.server.call_context import CallContext, call_context
from headrace_protos import rest_pb2, rest_pb2_grpc
from headrace_transformer.frontends.http import EVENTS, JSON, PLAIN, Body, Events, json_body, rest_errors
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat, Format
from headrace_transformer.frontends.openai.bodies import answer
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.generation_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from headrace_transformer.frontends.openai.models import OpenAIModels, RequestReader
from headrace_transformer.frontends.openai.scores import classify, embed, rerank, score
from headrace_transformer.frontends.openai.text_requests import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from headrace_transformer.frontends.openai.tokenizing import detokenize, tokenize, tokenizer_of
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.resume_ids import identity_of
from headrace_transformer.inference.encoder_calls import EncoderCalls
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router
from headrace_transformer.text.tokenizer import TextTokenizer

_LAST_EVENT_ID = "last-event-id"


class OpenAIServicer(rest_pb2_grpc.OpenAIServicer):
    """`keep_alive_s` of silence are filled with a comment in streams of events; 0: are not."""

    def __init__(
        self,
        pipeline: Pipeline,
        router: Router,
        encoders: EncoderCalls,
        bodies: BodyProcesses,
        passing: Passing,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._bodies = bodies
        self._passing = passing
        self._keep_alive_s = keep_alive_s
        self._pipeline = pipeline
        self._router = router
        self._encoders = encoders
        self._models = OpenAIModels(router)
        reader = RequestReader(pipeline, bodies, self._models)
        self._read, self._parsed = reader.read, reader.parsed

    @rest_errors(openai_error)
    async def Health(self, request: Empty, context: Context) -> AsyncGenerator[HttpBody, None]:
        if not self._router.ready:
            raise NotReadyError("not ready", hop="predictor")
        yield HttpBody(content_type=PLAIN)

    @rest_errors(openai_error)
    async def Version(self, request: Empty, context: Context) -> AsyncGenerator[HttpBody, None]:
        yield json_body({"version": __version__})

    @rest_errors(openai_error)
    async def Models(self, request: Empty, context: Context) -> AsyncGenerator[HttpBody, None]:
        yield json_body({"object": "list", "data": self._models.cards(client_of(call_metadata(context)))})

    @rest_errors(openai_error)
    async def Model(self, request: rest_pb2.ModelRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        client_of(call_metadata(context)).check_model(request.model)
        yield json_body(self._models.card(request.model))

    @rest_errors(openai_error)
    async def Completions(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Completions")
        if (answer := await self._passed(request, "/completions", call)) is None:
            parsed = await self._read(CompletionRequest, request, call, "generation")
            answer = self._answer(parsed, CompletionFormat(parsed), request.data, call)
        async with aclosing(answer) as bodies:
            async for body in bodies:
                yield body

    @rest_errors(openai_error)
    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/ChatCompletions")
        if (answer := await self._passed(request, "/chat/completions", call)) is None:
            parsed = await self._read(ChatCompletionRequest, request, call, "generation")
            answer = self._answer(parsed, ChatFormat(parsed), request.data, call)
        async with aclosing(answer) as bodies:
            async for body in bodies:
                yield body

    @rest_errors(openai_error)
    async def Embeddings(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Embeddings")
        if (answer := await self._passed(request, "/embeddings", call)) is not None:
            async with aclosing(answer) as bodies:
                async for body in bodies:
                    yield body
            return
        parsed = await self._read(EmbeddingsRequest, request, call, "embedding")
        for piece in await embed(parsed, self._encoders, call):
            yield HttpBody(content_type=JSON, data=piece)

    @rest_errors(openai_error)
    async def Classify(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Classify")
        parsed = await self._read(ClassifyRequest, request, call, "classification")
        yield json_body(await classify(parsed, self._encoders, call))

    @rest_errors(openai_error)
    async def Score(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Score")
        if (answer := await self._passed(request, "/score", call)) is not None:
            async with aclosing(answer) as bodies:
                async for body in bodies:
                    yield body
            return
        parsed = await self._read(ScoreRequest, request, call, "classification", "embedding")
        yield json_body(await score(parsed, self._encoders, call))

    @rest_errors(openai_error)
    async def Rerank(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Rerank")
        if (answer := await self._passed(request, "/rerank", call)) is not None:
            async with aclosing(answer) as bodies:
                async for body in bodies:
                    yield body
            return
        parsed = await self._read(RerankRequest, request, call, "classification", "embedding")
        yield json_body(await rerank(parsed, self._encoders, call))

    @rest_errors(openai_error)
    async def Tokenize(self, request: HttpBody, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Tokenize")
        parsed = await self._parsed(TokenizeRequest, request, call)
        tokenizer, context_length = await self._tokenizer_for(parsed.model, call)
        yield json_body(await tokenize(parsed, tokenizer, context_length, self._bodies, call.deadline))

    @rest_errors(openai_error)
    async def Detokenize(self, request: HttpBody, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/Detokenize")
        parsed = await self._parsed(DetokenizeRequest, request, call)
        tokenizer, _ = await self._tokenizer_for(parsed.model, call)
        yield json_body(detokenize(parsed, tokenizer))

    @rest_errors(openai_error)
    async def TokenizerInfo(self, request: rest_pb2.ModelRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.OpenAI/TokenizerInfo")
        tokenizer, context_length = await self._tokenizer_for(request.model, call)
        yield json_body(tokenizer.description | {"model_max_length": context_length})

    async def _passed(self, request: HttpBody, path: str, call: CallContext) -> AsyncGenerator[Body, None] | None:
        """The answer to a request that an engine gets as it is, None for any other."""
        return await self._passing.found(request, path, call, self._models.resolve)

    async def _tokenizer_for(self, name: str, call: CallContext) -> tuple[TextTokenizer, int | None]:
        """The tokenizer of a model, of the only one that generates where none is named, and the model's context."""
        name = self._models.resolve(name, call.client, "generation")
        return tokenizer_of((await self._router.wait_for(name, "", call)).model)

    async def _answer(
        self, parsed: GenerationRequest, shape: Format, body: bytes, call: CallContext
    ) -> AsyncGenerator[Body, None]:
        """The answer to a request for text.

        Events have ids for clients that ask for server-sent events by `Accept`, as those do that reconnect by
        themselves. Many others take every line of a stream for data.
        """
        has_ids = parsed.stream and EVENTS in call.header("accept")
        with self._pipeline.recording_refusals(call, parsed.model):
            last_id, signer = call.header(_LAST_EVENT_ID), self._pipeline.signer
            identity = await identity_of(call, body, last_id, signer=signer, has_ids=has_ids)
        if parsed.stream:
            yield Events(self._keep_alive_s)
        async with aclosing(answer(self._pipeline, parsed.generations(call), parsed, shape, identity)) as bodies:
            async for written in bodies:
                yield written
