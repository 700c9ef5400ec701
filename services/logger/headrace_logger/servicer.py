"""The logger's gRPC services over the store: PayloadLog reads and deletes records, PayloadIngest receives them.

A client whose policy makes it a user reads, follows and deletes only its own records: records of other clients appear
not to exist, and a request that names another client raises ForbiddenError. Admins, and all callers where there are no
keys, have all records.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from headrace.clients import client_of
from headrace.errors import ForbiddenError, InvalidRequestError, NotFoundError
from headrace.payload.records import answer_of
from headrace.rpc import Context, Handler
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.handlers import errors_in_band
from headrace_logger.read_limits import Readers, caller_of
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_logger.tails import OpenTail, Tails
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.headrace_pb2 import (
    AppendRequest,
    AppendResponse,
    DeletePayloadsRequest,
    DeletePayloadsResponse,
    GetPayloadRequest,
    PayloadRecord,
    QueryPayloadsRequest,
    TailPayloadsRequest,
    UsageRequest,
    UsageResponse,
)

PAYLOAD_LOG = headrace_pb2.DESCRIPTOR.services_by_name["PayloadLog"].full_name
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_GATHER_S = 0.005  # Requests that arrive within this time share a commit.
_MAX_ARRIVED_BYTES = 8 * 1024 * 1024
_MAX_SEQUENCE = 2**63 - 1
_UUID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

Response: TypeAlias = bytes | PayloadRecord  # A serialized message or a message.


def _error(error: str) -> Response:
    return PayloadRecord(error=error)


class PayloadLogServicer:
    """Returns records by key, by filter, and as they are committed, and their usage; deletes them by key.

    Records are sent as the store has them, serialized. Get is implemented as a stream of one record, which is the same
    on the wire: so the loan for its memory lasts until it has been sent.
    """

    def __init__(self, store: Store, tails: Tails, readers: Readers | None = None) -> None:
        self._store = store
        self._tails = tails
        self._readers = readers or Readers()

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Handler] = {
            "Get": grpc.unary_stream_rpc_method_handler(self.Get, GetPayloadRequest.FromString, _serialized),
            "Query": grpc.unary_stream_rpc_method_handler(self.Query, QueryPayloadsRequest.FromString, _serialized),
            "Tail": grpc.unary_stream_rpc_method_handler(self.Tail, TailPayloadsRequest.FromString, _serialized),
            "Delete": grpc.unary_unary_rpc_method_handler(self.Delete, DeletePayloadsRequest.FromString, _serialized),
            "Usage": grpc.unary_unary_rpc_method_handler(self.Usage, UsageRequest.FromString, _serialized),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PAYLOAD_LOG, handlers),))

    async def Get(self, request: GetPayloadRequest, context: Context) -> AsyncGenerator[Response, None]:
        key = request.WhichOneof("key")
        if key is None:
            raise InvalidRequestError("give a record_id or a request_id")
        client = _restricted_to(context)
        with self._readers.reader(caller_of(context)) as reader:
            if key == "record_id":
                found = self._store.get(request.record_id, reader, client)
            else:
                filters = Filters(QueryPayloadsRequest(request_id=request.request_id, client=client))
                found = self._store.query(filters, None, 1, reader)
            async with aclosing(found):
                async for record in found:
                    yield record._replace(page_token="").serialized
                    return
        raise NotFoundError(f"no record has the {key} {getattr(request, key)!r}")

    async def Delete(self, request: DeletePayloadsRequest, context: Context) -> DeletePayloadsResponse:
        key = request.WhichOneof("key")
        # An empty value would match every record without one.
        if key is None or not getattr(request, key):
            raise InvalidRequestError("give a record_id, a request_id or a client")
        client = _restricted_to(context)
        if key == "client" and client not in (None, request.client):
            raise _not_its_own(client)
        return DeletePayloadsResponse(deleted=await self._store.delete(client, **{key: getattr(request, key)}))

    async def Usage(self, request: UsageRequest, context: Context) -> UsageResponse:
        _restrict(request, context)
        if request.own:
            own = client_of(context.invocation_metadata() or ()).name
            if request.HasField("client") and request.client != own:
                raise InvalidRequestError("own and client name different clients", param="client")
            request.client = own
        with self._readers.reader(caller_of(context)):
            return await self._store.usage(request)

    @errors_in_band(_error)
    async def Query(self, request: QueryPayloadsRequest, context: Context) -> AsyncGenerator[Response, None]:
        limit = request.page_size or DEFAULT_PAGE_SIZE
        if limit > MAX_PAGE_SIZE:
            raise InvalidRequestError(f"page_size {limit} is above {MAX_PAGE_SIZE}")
        _restrict(request, context)
        with self._readers.reader(caller_of(context)) as reader:
            found = self._store.query(Filters(request), request.page_token or None, limit, reader)
            async with aclosing(found):
                async for record in found:
                    yield record.serialized

    async def Tail(self, request: TailPayloadsRequest, context: Context) -> AsyncGenerator[Response, None]:
        _restrict(request, context)
        async with self._tails.open(Filters(request), caller_of(context)) as tail:
            # Response headers signal that the tail is open: a query after them misses no record between the two.
            await head_of_call().send(context, even_empty=True)
            async with aclosing(self._follow(tail, context)) as records:
                async for record in records:
                    yield record

    @errors_in_band(_error, headers_are_out=True)
    async def _follow(self, tail: OpenTail, context: Context) -> AsyncGenerator[Response, None]:
        async with aclosing(tail.records(partial(self._readers.lend, tail.caller))) as records:
            async for record in records:
                yield record


def _restricted_to(context: Context) -> str | None:
    """The client to whose records the caller is restricted; None: no restriction."""
    client = client_of(context.invocation_metadata() or ())
    return None if client.is_admin else client.name


def _restrict(request: QueryPayloadsRequest | TailPayloadsRequest | UsageRequest, context: Context) -> None:
    """Restricts a request to what its caller may have."""
    client = _restricted_to(context)
    if client is None:
        return
    if request.HasField("client") and request.client != client:
        raise _not_its_own(client)
    request.client = client


def _not_its_own(client: str | None) -> ForbiddenError:
    return ForbiddenError(f"the client {client} may read and delete only its own records")


def _serialized(response: bytes | Message) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


class PayloadIngestServicer(headrace_pb2_grpc.PayloadIngestServicer):
    """Commits what taps send, in batches.

    A call has no end of its own. When `stopping` is set it ends, after the commit and acknowledgement of everything
    that has arrived; the tap sends the rest to the next process.
    """

    def __init__(self, store: Store, stopping: asyncio.Event) -> None:
        self._store = store
        self._stopping = stopping

    async def Append(
        self, request_iterator: AsyncIterator[AppendRequest], context: Context
    ) -> AsyncIterator[AppendResponse]:
        arrivals = _Arrivals()
        reader = asyncio.create_task(arrivals.read(request_iterator), name="append reader")
        stop = asyncio.create_task(self._stopping.wait(), name="append stop")
        stop.add_done_callback(lambda _: reader.cancel())
        try:
            while batch := await arrivals.take():
                await self._store.append(batch)
                yield AppendResponse(sequence=max(request.sequence for request in batch))
            with suppress(asyncio.CancelledError):
                reader.result()
        finally:
            stop.cancel()
            reader.cancel()
            await asyncio.gather(stop, reader, return_exceptions=True)


class _Arrivals:
    """Requests that have arrived and wait for the previous commit; bounded by size."""

    def __init__(self) -> None:
        self._waiting: list[AppendRequest] = []
        self._bytes = 0
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def take(self) -> list[AppendRequest]:
        """Returns all that have arrived, at least one; empty after the last."""
        await self._news.wait()
        if not self._ended:
            await asyncio.sleep(_GATHER_S)
        batch, self._waiting, self._bytes = self._waiting, [], 0
        if not self._ended:
            self._news.clear()
        self._room.set()
        return batch

    async def read(self, requests: AsyncIterator[AppendRequest]) -> None:
        """Collects requests until they end, or the task is cancelled; raises the error of an invalid request."""
        try:
            async for request in requests:
                for each in (request, *request.more):
                    _check(each)
                    each.record.text = answer_of(each.record)  # Protobuf has merged the record's parts.
                    self._waiting.append(each)
                self._bytes += request.ByteSize()
                self._news.set()
                if self._bytes >= _MAX_ARRIVED_BYTES:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._ended = True
            self._news.set()


def _check(request: AppendRequest) -> None:
    if not request.source:
        raise InvalidRequestError("an append without a source")
    if not 0 < request.sequence <= _MAX_SEQUENCE:
        raise InvalidRequestError(f"sequence {request.sequence} is not between 1 and {_MAX_SEQUENCE}")
    if not _UUID.fullmatch(request.record.record_id):
        raise InvalidRequestError(f"record_id {request.record.record_id!r} is not a UUID")
