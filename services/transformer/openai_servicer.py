"""OpenAI's API: models, completions, chat completions and embeddings.

`stream: true` answers with server-sent events ending in `data: [DONE]`, the choices among each other
as they come. Each choice is one generation, with a record of its own under the request's id.
Source: OpenAI's API reference for the shapes of answers, chunks and errors.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from millrace.errors import NotFoundError, NotReadyError
from millrace.interceptors import Context
from millrace.protos import rest_pb2, rest_pb2_grpc
from millrace.recorded_call import Origin, origin_of
from millrace.resumable import FINGERPRINT
from services.transformer.calls import timeout_of
from services.transformer.catalogue import Catalogue
from services.transformer.models import RelayedModel, TextModel
from services.transformer.openai.answers import ChatFormat, CompletionFormat, Echoes
from services.transformer.openai.bodies import answer
from services.transformer.openai.choices import choices_of
from services.transformer.openai.embeddings import Embedder, EmbeddingsRequest, embeddings_json
from services.transformer.openai.errors import openai_error
from services.transformer.openai.generation_requests import (
    COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from services.transformer.openai.requests import parse
from services.transformer.pipeline import Pipeline, TextRequest
from services.transformer.rest import JSON, Body, KeepAlive, json_body, rest_errors
from services.transformer.tokenizer import TextTokenizer


class OpenAIServicer(rest_pb2_grpc.OpenAIServicer):
    """`keep_alive_s` of silence are filled with a comment in streams of events; 0: are not."""

    def __init__(
        self, pipeline: Pipeline, catalogue: Catalogue, embedder: Embedder, keep_alive_s: float = 15.0
    ) -> None:
        self._keep_alive_s = keep_alive_s
        self._pipeline = pipeline
        self._catalogue = catalogue
        self._embedder = embedder
        self._started = int(time.time())

    @rest_errors(openai_error)
    async def Models(self, request: Empty, context: Context) -> AsyncGenerator[HttpBody, None]:
        cards = []
        for name in self._catalogue.names:
            try:
                cards.append(self._card(name))
            except (NotFoundError, NotReadyError):
                continue  # It is of another API, or it will be listed when it has loaded.
        yield json_body({"object": "list", "data": cards})

    @rest_errors(openai_error)
    async def Model(self, request: rest_pb2.ModelRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        yield json_body(self._card(request.model))

    @rest_errors(openai_error)
    async def Completions(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        origin = origin_of(context, "millrace.rest.v1.OpenAI/Completions")
        with self._pipeline.recording_refusals(origin):
            asked = parse(CompletionRequest, request.data)
        if asked.stream:
            yield KeepAlive(self._keep_alive_s)
        timeout_s = timeout_of(context)
        echoes = tokens = None
        if asked.echo or asked.logprobs is not None:
            tokenizer = await self._tokenizer(origin, asked.model, timeout_s)
            echoes = Echoes(asked.prompt, asked.n, tokenizer) if asked.echo else None
            tokens = None if asked.logprobs is None else tokenizer.token_bytes
        generations = [
            choice
            for prompt in asked.prompt
            for choice in choices_of(
                TextRequest(
                    origin=origin,
                    model=asked.model,
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_ids=None if isinstance(prompt, str) else prompt,
                    sampling=asked.sampling(),
                    default_max_tokens=COMPLETION_MAX_TOKENS,
                    stop=asked.stop,
                    timeout_s=timeout_s,
                ),
                asked.n,
            )
        ]
        async with aclosing(answer(self._pipeline, generations, asked, CompletionFormat(echoes, tokens))) as bodies:
            async for body in bodies:
                yield body

    @rest_errors(openai_error)
    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        origin = origin_of(context, "millrace.rest.v1.OpenAI/ChatCompletions")
        with self._pipeline.recording_refusals(origin):
            asked = parse(ChatCompletionRequest, request.data)
        if asked.stream:
            yield KeepAlive(self._keep_alive_s)
        timeout_s = timeout_of(context)
        generations = choices_of(
            TextRequest(
                origin=origin,
                model=asked.model,
                messages=[(message.role, message.content) for message in asked.messages],
                template_options=asked.chat_template_kwargs,
                sampling=asked.sampling(),
                stop=asked.stop,
                timeout_s=timeout_s,
            ),
            asked.n,
        )
        tokens = (await self._tokenizer(origin, asked.model, timeout_s)).token_bytes if asked.logprobs else None
        shape = ChatFormat(tokens)
        async with aclosing(answer(self._pipeline, generations, asked, shape)) as bodies:
            async for body in bodies:
                yield body

    @rest_errors(openai_error)
    async def Embeddings(self, request: HttpBody, context: Context) -> AsyncGenerator[HttpBody, None]:
        origin = origin_of(context, "millrace.rest.v1.OpenAI/Embeddings")
        with self._pipeline.recording_refusals(origin):
            asked = parse(EmbeddingsRequest, request.data)
        vectors, tokens = await self._embedder.embed(asked, origin, timeout_of(context))
        for piece in embeddings_json(asked, vectors, tokens):
            yield HttpBody(content_type=JSON, data=piece)

    async def _tokenizer(self, origin: Origin, model: str, timeout_s: float | None) -> TextTokenizer:
        with self._pipeline.recording_refusals(origin, model):
            return (await self._catalogue.get(model, "", origin, timeout_s)).tokenizer

    def _card(self, name: str) -> dict[str, Any]:
        """What is told of a model; NotFoundError where OpenAI's API has no use for it."""
        model = self._catalogue.find(name)
        if isinstance(model, TextModel):
            kind = "generation"
        elif isinstance(model, RelayedModel) and model.tokenizer is not None:
            kind = "embedding"
        else:
            raise NotFoundError(f"model {name!r} takes tensors; OpenAI's API does not serve it")
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "millrace", "kind": kind}
        return card | ({FINGERPRINT: model.fingerprint} if model.fingerprint else {})
