"""Answers a line of a batch by the method that answers the same request by HTTP, in this process.

Beside a request by HTTP it has no deadline of its own, is marked (CallContext.is_background), and has a trace of its
own, which is linked to the call that created the batch.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

import orjson
from google.api.httpbody_pb2 import HttpBody
from opentelemetry import trace

from headrace.errors import HeadraceError, InvalidRequestError, RequestFailedError
from headrace.rpc import Context
from headrace.rpc.server.call_context import BACKGROUND
from headrace.telemetry.identity import (
    CLIENT_NAME,
    REQUEST_ID,
    REQUEST_ID_METADATA,
    TRANSCODED,
    as_metadata,
    begin_request,
    links_to,
)
from headrace_transformer.batches.lines import Line
from headrace_transformer.batches.objects import Batch, Result
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.servicer import OpenAIServicer
from headrace_transformer.frontends.responses.servicer import ResponsesServicer

Method = Callable[[Any, Any], AsyncGenerator[HttpBody, None]]


def methods_of(openai: OpenAIServicer, responses: ResponsesServicer) -> Mapping[str, Method]:
    """The methods of a batch's lines, by the endpoint."""
    return {
        "/v1/chat/completions": openai.ChatCompletions,
        "/v1/completions": openai.Completions,
        "/v1/responses": responses.Create,
        "/v1/embeddings": openai.Embeddings,
        "/v1/score": openai.Score,
        "/v1/rerank": openai.Rerank,
        "/classify": openai.Classify,
    }


class _LineContext:
    """What these methods use of a call's context."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> None:
        return None


def metadata_of(batch: Batch, request_id: str = "") -> tuple[tuple[str, str], ...]:
    """The metadata of a line's call: those of the batch's client."""
    return (
        *batch.headers,
        (BACKGROUND, batch.id),
        (TRANSCODED, batch.endpoint),
        (REQUEST_ID_METADATA, as_metadata(request_id)),
    )


async def answer_line(method: Method, batch: Batch, line: Line) -> tuple[Result, HeadraceError | None]:
    """The result of a line, and the error where it is one; in a task of its own."""
    request_id = f"{batch.id}/{line.custom_id}"
    begin_request(request_id)
    attributes = {REQUEST_ID: request_id, CLIENT_NAME: batch.client}
    tracer, links = trace.get_tracer("headrace"), links_to(batch.traceparent)
    error: HeadraceError | None = None
    pieces: list[bytes] = []
    with tracer.start_as_current_span("batch line", attributes=attributes, links=links) as span:
        try:
            if line.streams:
                raise InvalidRequestError("stream=true is not served in a batch", param="stream")
            context = cast(Context, _LineContext(metadata_of(batch, request_id)))
            async with aclosing(method(line.body, context)) as bodies:
                async for body in bodies:
                    pieces.append(body.data)
        except HeadraceError as raised:
            error = raised
            span.set_status(trace.StatusCode.ERROR, raised.message)
    status, answer = 200, b"".join(pieces)
    if error is None and answer[:1] not in (b"{", b"["):
        error = RequestFailedError("the answer is not JSON")
    if error is not None:
        status, answer = error.http_status, orjson.dumps(openai_error(error))
    return Result(line.number, line.custom_id, request_id, status, answer), error
