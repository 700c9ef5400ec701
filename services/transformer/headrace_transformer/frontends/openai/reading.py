"""Reads the JSON bodies of requests for text, in a process of their own where they are large."""

from __future__ import annotations

from google.api.httpbody_pb2 import HttpBody

from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.models import Kind, OpenAIModels
from headrace_transformer.frontends.openai.requests import (
    IGNORED_FIELDS,
    MAX_BODY_BYTES,
    OpenAIRequest,
    RequestT,
    parse,
    parse_large,
)
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses


def name_ignored(request: OpenAIRequest) -> None:
    """Names in the head of the answer the fields of a request that have no effect."""
    if ignored := request.ignored_fields():
        head_of_call().add((IGNORED_FIELDS, ", ".join(ignored)))


class RequestReader:
    """Owned by the event loop."""

    def __init__(self, pipeline: Pipeline, bodies: BodyProcesses, models: OpenAIModels) -> None:
        self._pipeline = pipeline
        self._bodies = bodies
        self._models = models

    async def read(self, cls: type[RequestT], request: HttpBody, call: CallContext, *kinds: Kind) -> RequestT:
        """The request in a body, with its model's name; one that is refused is on record."""
        with self._pipeline.recording_refusals(call):
            parsed = await self.parsed(cls, request, call)
            parsed.model = self._models.resolve(parsed.model, call.client, *kinds)
            if parsed.template_hints:
                parsed.name_unread_hints(self._models.template_reader(parsed.model))
        name_ignored(parsed)
        return parsed

    async def parsed(self, cls: type[RequestT], request: HttpBody, call: CallContext) -> RequestT:
        """The request in a body; see `parse`."""
        data = request.data
        if not SMALL_BYTES < len(data) <= MAX_BODY_BYTES:
            return parse(cls, data)
        parsed: tuple[RequestT, bytes] = await self._bodies.run(parse_large, (cls,), data, call.deadline)
        return parsed[0]
