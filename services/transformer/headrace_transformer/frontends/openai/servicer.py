"""OpenAI's API: models, completions, chat completions and embeddings; and vLLM's paths beyond it.

`stream: true` answers with server-sent events that end in `data: [DONE]`; the chunks of all choices are interleaved as
they arrive. Each choice is one generation, with its own record under the request's id. Served by HTTP.
Source: OpenAI's API reference for the shapes of answers, chunks and errors; vLLM's server for those of `/tokenize`,
`/detokenize` and `/tokenizer_info`.
"""

from __future__ import annotations

from contextlib import aclosing

from google.api.httpbody_pb2 import HttpBody

from headrace import __version__
from headrace.errors import NotReadyError
from headrace.rpc.http2.request import Argument
from headrace.rpc.server.call_context import CallContext
from headrace_protos import rest_pb2_grpc
from headrace_transformer.frontends.http import EVENTS, JSON, PLAIN, Bodies, Events, bodies_of, json_body, rest_method
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat, Format
from headrace_transformer.frontends.openai.bodies import answer
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.generation_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from headrace_transformer.frontends.openai.models import FrontEnd, check_text
from headrace_transformer.frontends.openai.scores import classify, embed, rerank, score
from headrace_transformer.frontends.openai.text_requests import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from headrace_transformer.inference.encoder_calls import EncoderCalls

_LAST_EVENT_ID = "last-event-id"


class OpenAIServicer(rest_pb2_grpc.OpenAIServicer):
    def __init__(self, front: FrontEnd, encoders: EncoderCalls) -> None:
        self._front = front
        self._encoders = encoders

    @rest_method(openai_error)
    async def Health(self, request: Argument, call: CallContext) -> HttpBody:
        if not self._front.router.catalogue.ready:
            raise NotReadyError("not ready", hop="predictor")
        return HttpBody(content_type=PLAIN)

    @rest_method(openai_error)
    async def Version(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body({"version": __version__})

    @rest_method(openai_error)
    async def Models(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body({"object": "list", "data": self._front.cards(call.client)})

    @rest_method(openai_error)
    async def Model(self, request: Argument, call: CallContext) -> HttpBody:
        name = request.named("model")
        call.client.check_model(name)
        return json_body(self._front.card(name))

    @rest_method(openai_error)
    async def Completions(self, request: bytes, call: CallContext) -> Bodies:
        if (passed := await self._front.passed(request, "/completions", call)) is not None:
            return passed
        parsed = await self._front.read(CompletionRequest, request, call, "generation")
        return self._answer(parsed, CompletionFormat(parsed), request, call)

    @rest_method(openai_error)
    async def ChatCompletions(self, request: bytes, call: CallContext) -> Bodies:
        if (passed := await self._front.passed(request, "/chat/completions", call)) is not None:
            return passed
        parsed = await self._front.read(ChatCompletionRequest, request, call, "generation")
        return self._answer(parsed, ChatFormat(parsed), request, call)

    @rest_method(openai_error)
    async def Embeddings(self, request: bytes, call: CallContext) -> Bodies:
        if (passed := await self._front.passed(request, "/embeddings", call)) is not None:
            return passed
        parsed = await self._front.read(EmbeddingsRequest, request, call, "embedding")
        return bodies_of(JSON, await embed(parsed, self._encoders, call))

    @rest_method(openai_error)
    async def Classify(self, request: bytes, call: CallContext) -> HttpBody:
        parsed = await self._front.read(ClassifyRequest, request, call, "classification")
        return json_body(await classify(parsed, self._encoders, call))

    @rest_method(openai_error)
    async def Score(self, request: bytes, call: CallContext) -> HttpBody | Bodies:
        if (passed := await self._front.passed(request, "/score", call)) is not None:
            return passed
        parsed = await self._front.read(ScoreRequest, request, call, "classification", "embedding")
        return json_body(await score(parsed, self._encoders, call))

    @rest_method(openai_error)
    async def Rerank(self, request: bytes, call: CallContext) -> HttpBody | Bodies:
        if (passed := await self._front.passed(request, "/rerank", call)) is not None:
            return passed
        parsed = await self._front.read(RerankRequest, request, call, "classification", "embedding")
        return json_body(await rerank(parsed, self._encoders, call))

    @rest_method(openai_error)
    async def Tokenize(self, request: bytes, call: CallContext) -> HttpBody:
        parsed = await self._front.parsed(TokenizeRequest, request, call)
        tokenizer, context_length = await self._front.tokenizer(parsed.model, call)
        text, adds_special_tokens = parsed.prompt, parsed.add_special_tokens is not False
        if text is None:
            text = await self._front.chat_text(tokenizer, parsed, call)
            adds_special_tokens = parsed.add_special_tokens is True
        check_text(text)  # One longer than the context is tokenised too, so that its length is known.
        ids = await tokenizer.ids(text, adds_special_tokens)
        strings = await tokenizer.strings(ids) if parsed.return_token_strs else None
        return json_body({"count": len(ids), "max_model_len": context_length, "tokens": ids, "token_strs": strings})

    @rest_method(openai_error)
    async def Detokenize(self, request: bytes, call: CallContext) -> HttpBody:
        parsed = await self._front.parsed(DetokenizeRequest, request, call)
        tokenizer, _ = await self._front.tokenizer(parsed.model, call)
        return json_body({"prompt": tokenizer.backend.decode(parsed.tokens[0], skip_special_tokens=False)})

    @rest_method(openai_error)
    async def TokenizerInfo(self, request: Argument, call: CallContext) -> HttpBody:
        tokenizer, context_length = await self._front.tokenizer(request.named("model"), call)
        return json_body(tokenizer.description | {"model_max_length": context_length})

    async def _answer(self, parsed: GenerationRequest, shape: Format, body: bytes, call: CallContext) -> Bodies:
        """The answer to a request for text.

        Events have ids for clients that ask for server-sent events by `Accept`, as those do that reconnect by
        themselves. Many others take every line of a stream for data.
        """
        has_ids, last_id = parsed.stream and EVENTS in call.header("accept"), call.header(_LAST_EVENT_ID)
        identity = await self._front.identity(body, parsed.model, call, last_id, has_ids)
        if parsed.stream:
            yield Events(self._front.keep_alive_s)
        pipeline, generations = self._front.pipeline, parsed.generations(call)
        async with aclosing(answer(pipeline, generations, parsed, shape, identity)) as bodies:
            async for written in bodies:
                yield written
