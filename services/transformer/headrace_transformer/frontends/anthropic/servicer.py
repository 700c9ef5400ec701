"""Anthropic's Messages API on the pipeline of all front ends; served by HTTP, as OpenAI's API is.

A stream that broke is not continued by `Last-Event-ID`; with the same `Idempotency-Key` its answer is repeated.
Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from headrace.clients import client_of
from headrace.errors import InvalidRequestError
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.rpc.server.call_context import call_context
from headrace_protos import rest_pb2, rest_pb2_grpc
from headrace_transformer.frontends.anthropic.answers import anthropic_error, events, model_info, model_list, whole
from headrace_transformer.frontends.anthropic.requests import ConversationRequest, MessagesRequest
from headrace_transformer.frontends.http import Body, Events, json_body, named_event, rest_errors
from headrace_transformer.frontends.openai.models import OpenAIModels, RequestReader, name_ignored
from headrace_transformer.frontends.openai.tokenizing import chat_text, tokenizer_of
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.resume_ids import identity_of
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router


class AnthropicServicer(rest_pb2_grpc.AnthropicServicer):
    """`keep_alive_s` of silence are filled with a comment in streams of events; 0: are not."""

    def __init__(
        self,
        pipeline: Pipeline,
        router: Router,
        bodies: BodyProcesses,
        passing: Passing,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._pipeline = pipeline
        self._passing = passing
        self._router = router
        self._bodies = bodies
        self._keep_alive_s = keep_alive_s
        self._models = OpenAIModels(router)
        self._reader = RequestReader(pipeline, bodies, self._models)

    @rest_errors(anthropic_error)
    async def Models(self, request: Empty, context: Context) -> AsyncGenerator[HttpBody, None]:
        yield json_body(model_list(self._models.cards(client_of(call_metadata(context)))))

    @rest_errors(anthropic_error)
    async def Model(self, request: rest_pb2.ModelRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        client_of(call_metadata(context)).check_model(request.model)
        yield json_body(model_info(self._models.card(request.model)))

    @rest_errors(anthropic_error)
    async def Messages(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.Anthropic/Messages")
        if (passed := await self._passing.found(request, "/messages", call, self._models.resolve)) is not None:
            async with aclosing(passed) as bodies:
                async for body in bodies:
                    yield body
            return
        parsed = await self._reader.read(MessagesRequest, request, call, "generation")
        with self._pipeline.recording_refusals(call, parsed.model):
            identity = await identity_of(call, request.data, signer=self._pipeline.signer, has_ids=False)
        if parsed.stream:
            yield Events(self._keep_alive_s, lambda error: named_event(anthropic_error(error)))
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
            aclosing(self._pipeline.generate(generation)) as chunks,
            aclosing(write(identity.answer_id, parsed.model, chunks)) as written,
        ):
            async for body in written:
                yield body

    @rest_errors(anthropic_error)
    async def CountTokens(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.Anthropic/CountTokens")
        parsed = await self._reader.parsed(ConversationRequest, request, call)
        model = self._models.resolve(parsed.model, call.client, "generation")
        parsed.name_unread_hints(self._models.template_reader(model))
        name_ignored(parsed)
        tokenizer, _ = tokenizer_of((await self._router.wait_for(model, "", call)).model)
        if (tools := parsed.tool_use) is not None and not tokenizer.answer_syntax.takes_tools:
            raise InvalidRequestError("the chat template of the model has no place for tools", param="tools")
        definitions = "" if tools is None else tools.definitions
        options = parsed.template_options
        text = await chat_text(parsed.conversation, options, tokenizer, self._bodies, call.deadline, definitions)
        yield json_body({"input_tokens": len(await tokenizer.ids(text, add_special_tokens=False))})
