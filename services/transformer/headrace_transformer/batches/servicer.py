"""OpenAI's Batch API: files and batches. Served by HTTP.

Source: OpenAI's API reference for parameters, objects and lists.
"""

import asyncio
import re
import time
from collections.abc import Container, Sequence

from google.api.httpbody_pb2 import HttpBody
from opentelemetry import trace
from pydantic import Field

from headrace.clients import CLIENT, POLICY
from headrace.errors import InvalidRequestError, NotImplementedMethodError
from headrace.rpc.http2.request import Argument
from headrace.rpc.server.call_context import CallContext
from headrace.telemetry.identity import traceparent_of
from headrace_transformer.batches.lines import parse_upload
from headrace_transformer.batches.objects import Batch, StoredFile, new_id
from headrace_transformer.batches.store import Store
from headrace_transformer.frontends.http import Bodies, json_body, limit_of, newest_first, page_of, rest_method
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
    """Without a store every method is refused. `endpoints` are those that a batch may have."""

    def __init__(self, store: Store | None, endpoints: Container[str], bodies: BodyProcesses) -> None:
        self._kept = store
        self._endpoints = endpoints
        self._bodies = bodies

    @rest_method(openai_error)
    async def CreateFile(self, request: bytes, call: CallContext) -> HttpBody:
        store, content_type = self._store, call.header("content-type")
        is_small, arguments = len(request) <= SMALL_BYTES, (content_type,)
        upload, contents = await self._bodies.run_unless(is_small, parse_upload, arguments, request, call.deadline)
        if upload.purpose != _PURPOSE:
            raise InvalidRequestError("files are for batches here: purpose must be batch", param="purpose")
        file = await asyncio.to_thread(store.add_file, call.client, upload.filename, upload.purpose, contents)
        return json_body(file.shown())

    @rest_method(openai_error)
    async def ListFiles(self, request: Argument, call: CallContext) -> HttpBody:
        query, store = request.query, self._store
        limit = limit_of(query, _MAX_FILES_LISTED, _MAX_FILES_LISTED)
        purpose, after, order = query.get("purpose", ""), query.get("after", ""), newest_first(query)
        return _list(await asyncio.to_thread(store.files, call.client, purpose, after, limit, order), limit)

    @rest_method(openai_error)
    async def GetFile(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body((await asyncio.to_thread(self._store.file, call.client, request.rest)).shown())

    @rest_method(openai_error)
    async def GetFileContent(self, request: Argument, call: CallContext) -> Bodies:
        pieces = self._store.contents(call.client, request.rest)
        piece = await asyncio.to_thread(next, pieces, b"")
        while True:
            yield HttpBody(content_type="application/octet-stream", data=piece)
            piece = await asyncio.to_thread(next, pieces, b"")
            if not piece:
                return

    @rest_method(openai_error)
    async def DeleteFile(self, request: Argument, call: CallContext) -> HttpBody:
        await asyncio.to_thread(self._store.delete_file, call.client, request.rest)
        return json_body({"id": request.rest, "object": "file", "deleted": True})

    @rest_method(openai_error)
    async def CreateBatch(self, request: bytes, call: CallContext) -> HttpBody:
        store, parsed = self._store, parse(CreateBatchRequest, request)
        if parsed.endpoint not in self._endpoints:
            raise InvalidRequestError(f"batches of {parsed.endpoint[:64]!r} are not served", param="endpoint")
        name_ignored(parsed)
        batch = _new_batch(parsed, call)
        await asyncio.to_thread(store.create_batch, call.client, batch)
        return json_body(batch.shown())

    @rest_method(openai_error)
    async def ListBatches(self, request: Argument, call: CallContext) -> HttpBody:
        store, limit = self._store, limit_of(request.query, _BATCHES_LISTED, _MAX_BATCHES_LISTED)
        return _list(await asyncio.to_thread(store.batches, call.client, request.query.get("after", ""), limit), limit)

    @rest_method(openai_error)
    async def GetBatch(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body((await asyncio.to_thread(self._store.batch, call.client, request.rest)).shown())

    @rest_method(openai_error)
    async def CancelBatch(self, request: Argument, call: CallContext) -> HttpBody:
        return json_body((await asyncio.to_thread(self._store.cancel, call.client, request.rest)).shown())

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


def _list(found: Sequence[StoredFile | Batch], limit: int) -> HttpBody:
    """OpenAI's list of objects, of which there may be one more than `limit`."""
    return json_body(page_of([one.shown() for one in found[:limit]], has_more=len(found) > limit))
