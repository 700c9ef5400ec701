"""OpenAI's Responses API on the pipeline of all front ends; served by HTTP, as the rest of OpenAI's API.

Unless a request has `store: false`, its response can be continued and read as long as its record is in the payload
log; the log records a request in either case. A stream that broke is not continued by `Last-Event-ID`; with the same
`Idempotency-Key` its answer is repeated. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from google.api.httpbody_pb2 import HttpBody

from headrace.rpc import Context
from headrace.rpc.server.call_context import CallContext, call_context
from headrace_protos import rest_pb2, rest_pb2_grpc
from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_transformer.frontends.http import Body, Events, json_body, rest_errors
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.models import OpenAIModels, RequestReader
from headrace_transformer.frontends.openai.tools import TemplateMessage
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.frontends.responses.answers import ResponseAnswer
from headrace_transformer.frontends.responses.requests import ResponsesRequest
from headrace_transformer.frontends.responses.stored import (
    CALL_SEED,
    HAS_INSTRUCTIONS,
    ORIGINS,
    RESPONSE_ID,
    StoredResponses,
    cancelled,
    conversation_of,
    fields_of,
    input_items,
    messages_before,
    new_response_id,
    page_of,
    parameters_of,
    stored_response,
    tools_of,
)
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.resume_ids import identity_of
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router
from headrace_transformer.text.answer_parts import Part


class ResponsesServicer(rest_pb2_grpc.ResponsesServicer):
    """`log` is a PayloadLogStub; `keep_alive_s` of silence are filled with a comment in streams, 0: are not."""

    def __init__(
        self,
        pipeline: Pipeline,
        router: Router,
        bodies: BodyProcesses,
        log: Any,
        passing: Passing,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._pipeline = pipeline
        self._stored = StoredResponses(log, pipeline.signer)
        self._keep_alive_s = keep_alive_s
        self._passing = passing
        self._models = OpenAIModels(router)
        self._reader = RequestReader(pipeline, bodies, self._models)

    @rest_errors(openai_error)
    async def Create(self, request: HttpBody, context: Context) -> AsyncGenerator[Body, None]:
        call = call_context(context, "headrace.rest.v1.Responses/Create")
        if (passed := await self._passing.found(request, "/responses", call, self._models.resolve)) is not None:
            async with aclosing(passed) as bodies:
                async for body in bodies:
                    yield body
            return
        parsed = await self._reader.read(ResponsesRequest, request, call, "generation")
        with self._pipeline.recording_refusals(call, parsed.model):
            identity = await identity_of(call, request.data, signer=self._pipeline.signer, has_ids=False)
            previous = await self._previous(parsed, call)
        own_id = new_response_id(call, self._pipeline.signer)
        answer = ResponseAnswer(own_id, identity.created, parsed)
        if parsed.stream:
            yield Events(self._keep_alive_s, answer.failed)
        generation = parsed.text_request(
            call,
            messages=parsed.conversation(previous),
            template_options=parsed.template_options,
            drops_messages=parsed.truncation == "auto",
            default_seed=identity.seed,
            further_parameters=_further_parameters(parsed, own_id, identity.seed),
            tools=parsed.tool_use,
            has_parts=True,
        )
        write = answer.events if parsed.stream else answer.whole
        async with (
            aclosing(self._pipeline.generate(generation)) as chunks,
            aclosing(write(chunks)) as written,
        ):
            async for body in written:
                yield body

    @rest_errors(openai_error)
    async def Retrieve(self, request: rest_pb2.ResponseRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.Responses/Retrieve")
        record = await self._stored.find(request.response_id, call)
        yield json_body(stored_response(request.response_id, record, self._parts_of(record)))

    @rest_errors(openai_error)
    async def Delete(self, request: rest_pb2.ResponseRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.Responses/Delete")
        await self._stored.delete(await self._stored.find(request.response_id, call), call)
        yield json_body({"id": request.response_id, "object": "response", "deleted": True})

    @rest_errors(openai_error)
    async def Cancel(self, request: rest_pb2.ResponseRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.Responses/Cancel")
        yield json_body(cancelled(await self._stored.find(request.response_id, call)))

    @rest_errors(openai_error)
    async def InputItems(
        self, request: rest_pb2.ResponseItemsRequest, context: Context
    ) -> AsyncGenerator[HttpBody, None]:
        call = call_context(context, "headrace.rest.v1.Responses/InputItems")
        record = await self._stored.find(request.response_id, call)
        items = input_items(request.response_id, messages_before(record), fields_of(record))
        yield json_body(page_of(items, request.limit, request.order, request.after))

    async def _previous(self, parsed: ResponsesRequest, call: CallContext) -> list[TemplateMessage]:
        """The messages that the request continues."""
        if not parsed.previous_response_id:
            return []
        record = await self._stored.find(parsed.previous_response_id, call, "previous_response_id")
        return conversation_of(record, self._parts_of(record))

    def _parts_of(self, record: PayloadRecord) -> Sequence[Part]:
        served, seed = record.served_model or record.model, parameters_of(record).get(CALL_SEED, 0)
        return self._pipeline.parts_on_record(served, record.text, tools_of(record), seed, record.prompt_ids)


def _further_parameters(parsed: ResponsesRequest, own_id: str, seed: int) -> dict[str, Any]:
    """The parameters by which the record is found and read again, unless the client wants that it is not."""
    given: dict[str, Any] = {RESPONSE_ID: own_id} if parsed.store else {"store": False}
    if parsed.store and parsed.tools:
        given[CALL_SEED] = seed
        given |= {ORIGINS: dict(parsed.origins)} if parsed.origins else {}
    return given | {HAS_INSTRUCTIONS: True} if parsed.instructions else given
