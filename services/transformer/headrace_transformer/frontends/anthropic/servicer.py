"""Anthropic's Messages API on the pipeline of all front ends; served by HTTP, as OpenAI's API is.

A stream that broke is not continued by `Last-Event-ID`; with the same `Idempotency-Key` its answer is repeated.
Source: Anthropic's API reference.
"""

from contextlib import aclosing

from google.api.httpbody_pb2 import HttpBody

from headrace.rpc.http2.request import Argument
from headrace.rpc.server.call_context import CallContext
from headrace_protos import rest_pb2_grpc
from headrace_transformer.frontends.anthropic.answers import anthropic_error, events, model_info, model_list, whole
from headrace_transformer.frontends.anthropic.requests import ConversationRequest, MessagesRequest
from headrace_transformer.frontends.http import Bodies, Events, json_body, named_event, rest_method
from headrace_transformer.frontends.openai.models import FrontEnd, name_ignored


class AnthropicServicer(rest_pb2_grpc.AnthropicServicer):
    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    @rest_method(anthropic_error)
    async def Models(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body(model_list(self._front.cards(call.client)))

    @rest_method(anthropic_error)
    async def Model(self, request: Argument, call: CallContext) -> HttpBody:
        name = request.named("model")
        call.client.check_model(name)
        return json_body(model_info(self._front.card(name)))

    @rest_method(anthropic_error)
    async def Messages(self, request: bytes, call: CallContext) -> Bodies:
        if (passed := await self._front.passed(request, "/messages", call)) is not None:
            return passed
        return self._answer(await self._front.read(MessagesRequest, request, call, "generation"), request, call)

    async def _answer(self, parsed: MessagesRequest, body: bytes, call: CallContext) -> Bodies:
        identity = await self._front.identity(body, parsed.model, call)
        if parsed.stream:
            yield Events(self._front.keep_alive_s, lambda error: named_event(anthropic_error(error)))
        generation = parsed.text_request(
            call,
            messages=parsed.conversation,
            template_options=parsed.template_options,
            cuts_max_tokens=True,
            default_seed=identity.seed,
            tools=parsed.tool_use,
            has_parts=True,
        )
        write = events if parsed.stream else whole
        async with (
            aclosing(self._front.pipeline.generate(generation)) as chunks,
            aclosing(write(identity.answer_id, parsed.model, chunks)) as written,
        ):
            async for each in written:
                yield each

    @rest_method(anthropic_error)
    async def CountTokens(self, request: bytes, call: CallContext) -> HttpBody:
        front, parsed = self._front, await self._front.parsed(ConversationRequest, request, call)
        model = front.resolve(parsed.model, call.client, "generation")
        parsed.name_unread_hints(front.template_reader(model))
        name_ignored(parsed)
        tokenizer, _ = await front.tokenizer(model, call)
        text = await front.chat_text(tokenizer, parsed, call)
        return json_body({"input_tokens": len(await tokenizer.ids(text, add_special_tokens=False))})
