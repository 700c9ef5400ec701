"""OpenAI's Batch API: files and batches. Served by HTTP: http_methods.py.

Source: OpenAI's API reference for parameters, objects and lists.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Container, Sequence
from typing import Any

from google.api.httpbody_pb2 import HttpBody
from opentelemetry import trace
from pydantic import Field

from headrace.clients import CLIENT, POLICY
from headrace.errors import InvalidRequestError, NotImplementedMethodError
from headrace.rpc import Context
from headrace.rpc.server.call_context import CallContext, call_context
from headrace.telemetry.identity import traceparent_of
from headrace_protos import rest_pb2
from headrace_transformer.batches.objects import Batch, StoredFile, new_id
from headrace_transformer.batches.store import Store
from headrace_transformer.batches.uploads import parse_upload
from headrace_transformer.frontends.http import Body, json_body, rest_errors
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.models import name_ignored
from headrace_transformer.frontends.openai.requests import OpenAIRequest, parse
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses

_PURPOSE = "batch"
_MAX_FILES_LISTED, _MAX_BATCHES_LISTED, _BATCHES_LISTED = 10_000, 100, 20
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h", re.ASCII)
_MAX_HOURS = 168
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


class CreateBatchRequest(OpenAIRequest):
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = Field(default_factory=dict)

    def check(self) -> None:
        super().check()
        hours = _WINDOW.fullmatch(self.completion_window)
        if hours is None or int(hours[1]) > _MAX_HOURS:
            raise InvalidRequestError(
                f"completion_window must be hours from 1h to {_MAX_HOURS}h, such as 24h", param="completion_window"
            )
        if len(self.metadata) > _MAX_PAIRS or any(
            len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in self.metadata.items()
        ):
            raise InvalidRequestError(
                f"metadata has at most {_MAX_PAIRS} pairs, of {_MAX_KEY} and {_MAX_VALUE} characters", param="metadata"
            )

    @property
    def window_s(self) -> int:
        return int(self.completion_window[:-1]) * 3600


class BatchesServicer:
    """Without a store every method is refused. `endpoints` are those that a batch may have.

    A body is not wrapped in a message: it may be large, and would be copied.
    """

    def __init__(self, store: Store | None, endpoints: Container[str], bodies: BodyProcesses) -> None:
        self._kept = store
        self._endpoints = endpoints
        self._bodies = bodies

    @rest_errors(openai_error)
    async def CreateFile(self, request: bytes, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/CreateFile"), self._store
        content_type = call.header("content-type")
        if len(request) <= SMALL_BYTES:
            upload, contents = parse_upload(request, content_type)
        else:
            upload, contents = await self._bodies.run(parse_upload, (content_type,), request, call.deadline)
        if upload.purpose != _PURPOSE:
            raise InvalidRequestError("files are for batches here: purpose must be batch", param="purpose")
        file = await asyncio.to_thread(store.add_file, call.client, upload.filename, upload.purpose, contents)
        yield json_body(file.shown())

    @rest_errors(openai_error)
    async def ListFiles(self, request: rest_pb2.ListRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/ListFiles"), self._store
        limit = _limit(request.limit, _MAX_FILES_LISTED, _MAX_FILES_LISTED)
        if request.order not in ("", "asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", param="order")
        newest_first = request.order != "asc"
        found = await asyncio.to_thread(store.files, call.client, request.purpose, request.after, limit, newest_first)
        yield _list(found, limit)

    @rest_errors(openai_error)
    async def GetFile(self, request: rest_pb2.ObjectRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/GetFile"), self._store
        file = await asyncio.to_thread(store.file, call.client, request.id)
        yield json_body(file.shown())

    @rest_errors(openai_error)
    async def GetFileContent(self, request: rest_pb2.ObjectRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/GetFileContent"), self._store
        pieces = store.contents(call.client, request.id)
        piece = await asyncio.to_thread(next, pieces, b"")
        while True:
            yield HttpBody(content_type="application/octet-stream", data=piece)
            piece = await asyncio.to_thread(next, pieces, b"")
            if not piece:
                return

    @rest_errors(openai_error)
    async def DeleteFile(self, request: rest_pb2.ObjectRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/DeleteFile"), self._store
        await asyncio.to_thread(store.delete_file, call.client, request.id)
        yield json_body({"id": request.id, "object": "file", "deleted": True})

    @rest_errors(openai_error)
    async def CreateBatch(self, request: bytes, context: Context) -> AsyncGenerator[Body, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/CreateBatch"), self._store
        parsed = parse(CreateBatchRequest, request)
        if parsed.endpoint not in self._endpoints:
            raise InvalidRequestError(f"batches of {parsed.endpoint[:64]!r} are not served", param="endpoint")
        name_ignored(parsed)
        batch = _new_batch(parsed, call)
        await asyncio.to_thread(store.create_batch, call.client, batch)
        yield json_body(batch.shown())

    @rest_errors(openai_error)
    async def ListBatches(self, request: rest_pb2.ListRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/ListBatches"), self._store
        limit = _limit(request.limit, _BATCHES_LISTED, _MAX_BATCHES_LISTED)
        found = await asyncio.to_thread(store.batches, call.client, request.after, limit)
        yield _list(found, limit)

    @rest_errors(openai_error)
    async def GetBatch(self, request: rest_pb2.ObjectRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/GetBatch"), self._store
        batch = await asyncio.to_thread(store.batch, call.client, request.id)
        yield json_body(batch.shown())

    @rest_errors(openai_error)
    async def CancelBatch(self, request: rest_pb2.ObjectRequest, context: Context) -> AsyncGenerator[HttpBody, None]:
        call, store = call_context(context, "headrace.rest.v1.Batches/CancelBatch"), self._store
        batch = await asyncio.to_thread(store.cancel, call.client, request.id)
        yield json_body(batch.shown())

    @property
    def _store(self) -> Store:
        if self._kept is None:
            raise NotImplementedMethodError("batches are off: TRANSFORMER_BATCHES names no folder for them")
        return self._kept


def _new_batch(parsed: CreateBatchRequest, call: CallContext) -> Batch:
    now = int(time.time())
    return Batch(
        id=new_id("batch_"),
        client=call.header(CLIENT),
        policy=call.header(POLICY),
        traceparent=traceparent_of(trace.get_current_span()),
        endpoint=parsed.endpoint,
        input_file_id=parsed.input_file_id,
        completion_window=parsed.completion_window,
        metadata=parsed.metadata or None,
        created_at=now,
        expires_at=now + parsed.window_s,
    )


def _limit(given: int, default: int, most: int) -> int:
    if not 0 <= given <= most:
        raise InvalidRequestError(f"limit must be from 1 to {most}", param="limit")
    return given or default


def _list(found: Sequence[StoredFile | Batch], limit: int) -> HttpBody:
    """OpenAI's list of objects, of which there may be one more than `limit`."""
    data: list[dict[str, Any]] = [one.shown() for one in found[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    shown = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}
    return json_body(shown)
