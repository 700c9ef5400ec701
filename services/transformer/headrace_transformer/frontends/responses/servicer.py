"""OpenAI's Responses API on the pipeline of all front ends; served by HTTP, as the rest of OpenAI's API.

Unless a request has `store: false`, its response can be continued and read as long as its record is in the payload
log; the log records a request in either case. A stream that broke is not continued by `Last-Event-ID`; with the same
`Idempotency-Key` its answer is repeated. Source: OpenAI's API reference.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from google.api.httpbody_pb2 import HttpBody

from headrace.errors import InvalidRequestError
from headrace.rpc.http2.request import Argument
from headrace.rpc.server.call_context import CallContext
from headrace_protos import rest_pb2_grpc
from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_transformer.frontends.http import Bodies, Events, json_body, rest_method
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.models import FrontEnd
from headrace_transformer.frontends.openai.tools import TemplateMessage
from headrace_transformer.frontends.responses import stored
from headrace_transformer.frontends.responses.answers import ResponseAnswer
from headrace_transformer.frontends.responses.requests import ResponsesRequest
from headrace_transformer.text.answer_parts import Part


class ResponsesServicer(rest_pb2_grpc.ResponsesServicer):
    """`log` is a PayloadLogStub."""

    def __init__(self, front: FrontEnd, log: Any) -> None:
        self._front = front
        self._stored = stored.StoredResponses(log, front.pipeline.signer)

    @rest_method(openai_error)
    async def Create(self, request: bytes, call: CallContext) -> Bodies:
        if (passed := await self._front.passed(request, "/responses", call)) is not None:
            return passed
        return self._answer(await self._front.read(ResponsesRequest, request, call, "generation"), request, call)

    async def _answer(self, parsed: ResponsesRequest, body: bytes, call: CallContext) -> Bodies:
        pipeline = self._front.pipeline
        identity = await self._front.identity(body, parsed.model, call)
        with pipeline.recording_refusals(call, parsed.model):
            previous = await self._previous(parsed, call)
        own_id = stored.new_response_id(call, pipeline.signer)
        answer = ResponseAnswer(own_id, identity.created, parsed)
        if parsed.stream:
            yield Events(self._front.keep_alive_s, answer.failed)
        generation = parsed.text_request(
            call,
            messages=parsed.continuing(previous),
            template_options=parsed.template_options,
            drops_messages=parsed.truncation == "auto",
            default_seed=identity.seed,
            further_parameters=_further_parameters(parsed, own_id, identity.seed),
            tools=parsed.tool_use,
            has_parts=True,
        )
        write = answer.events if parsed.stream else answer.whole
        async with aclosing(pipeline.generate(generation)) as chunks, aclosing(write(chunks)) as written:
            async for each in written:
                yield each

    @rest_method(openai_error)
    async def Retrieve(self, request: Argument, call: CallContext) -> HttpBody:
        record = await self._stored.find(request.rest, call)
        return json_body(stored.stored_response(request.rest, record, self._parts_of(record)))

    @rest_method(openai_error)
    async def Delete(self, request: Argument, call: CallContext) -> HttpBody:
        await self._stored.delete(await self._stored.find(request.rest, call), call)
        return json_body({"id": request.rest, "object": "response", "deleted": True})

    @rest_method(openai_error)
    async def Cancel(self, request: Argument, call: CallContext) -> HttpBody:
        await self._stored.find(request.rest, call)
        # A response is on record when it has ended.
        raise InvalidRequestError("only a response with background: true can be cancelled, and there are none here")

    @rest_method(openai_error)
    async def InputItems(self, request: Argument, call: CallContext) -> HttpBody:
        record = await self._stored.find(request.rest, call)
        items = stored.input_items(request.rest, stored.messages_before(record), stored.fields_of(record))
        return json_body(stored.page_of_items(items, request.query))

    async def _previous(self, parsed: ResponsesRequest, call: CallContext) -> list[TemplateMessage]:
        """The messages that the request continues."""
        if not parsed.previous_response_id:
            return []
        record = await self._stored.find(parsed.previous_response_id, call, "previous_response_id")
        return stored.conversation_of(record, self._parts_of(record))

    def _parts_of(self, record: PayloadRecord) -> Sequence[Part]:
        served, seed = record.served_model or record.model, stored.parameters_of(record).get(stored.CALL_SEED, 0)
        parts_on_record, tools = self._front.pipeline.parts_on_record, stored.tools_of(record)
        return parts_on_record(served, record.text, tools, seed, record.prompt_ids)


def _further_parameters(parsed: ResponsesRequest, own_id: str, seed: int) -> dict[str, Any]:
    """The parameters by which the record is found and read again, unless the client wants that it is not."""
    given: dict[str, Any] = {stored.RESPONSE_ID: own_id} if parsed.store else {"store": False}
    if parsed.store and parsed.tools:
        given[stored.CALL_SEED] = seed
        given |= {stored.ORIGINS: dict(parsed.origins)} if parsed.origins else {}
    return given | {stored.HAS_INSTRUCTIONS: True} if parsed.instructions else given
