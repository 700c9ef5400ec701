"""One request on an HTTP/2 connection: the context that handlers get instead of gRPC's, and the task that runs them.

It has the methods of `grpc.aio.ServicerContext` that handlers, telemetry and admission use: metadata, deadline, `read`
of the one message, which is the body, `write` of HttpBody messages, `abort`. The metadata `x-http-status` of an
answer's head becomes its status. An error before the first byte is written as a body in the shape of its API. After the
first byte it is in the trailers: the gRPC status, which marks the gateway's span as failed, and the metadata.

`write` returns when the bytes are in the connection's buffer; it waits while the reader's window is closed or the
socket is full, so that what makes the answer waits too.

The deadline is gRPC's header, which the gateway sets for REST as well; it cancels the task, as a reset does.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn, cast

import grpc
from google.api.httpbody_pb2 import HttpBody
from grpc import StatusCode
from h2.errors import ErrorCodes

from headrace.deadline import PASSED
from headrace.errors import (
    HTTP_STATUS,
    DeadlineError,
    HeadraceError,
    NotFoundError,
    NotReadyError,
    RequestFailedError,
    from_metadata,
)
from headrace.rpc import Context
from headrace.rpc.http2.connection import HttpConnection
from headrace.rpc.http2.request import Argument, MethodTable, Pairs, RequestBody, read_head
from headrace.telemetry.identity import as_metadata

logger = logging.getLogger(__name__)

_JSON = "application/json"
_GRPC_STATUS = "grpc-status"
# Written within one turn of the event loop at most: many small pieces of one answer must not hold it.
_AT_ONCE_BYTES = 16 * 1024


class HttpExchange:
    """One request to one of the `methods`."""

    def __init__(
        self,
        connection: HttpConnection,
        stream_id: int,
        headers: Iterable[tuple[bytes, bytes]],
        methods: MethodTable,
    ) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._task: asyncio.Task[Any] | None = None
        self._ended_by: HeadraceError | None = None  # Why the server has cancelled the task.
        self._is_reset = False  # By the peer, or with the connection: nothing can be sent.
        self._room: asyncio.Future[None] | None = None
        self._unyielded = 0
        self.body = RequestBody(partial(connection.acknowledge, stream_id))
        self._methods = methods
        self._error_body = methods.error_body
        self._request = read_head(headers)
        self._argument: Argument | None = None  # The message of a method that takes no body.
        timeout_s = self._request.timeout_s
        self._deadline_at = None if timeout_s is None else time.monotonic() + timeout_s  # Of the monotonic clock.
        self._timer: asyncio.TimerHandle | None = None
        # The answer.
        self._head: Pairs = ()
        self._has_begun = False
        self._code: StatusCode | None = None
        self._trailing: Pairs = ()

    # ------------------------------------------------------------------ the context of a handler

    def invocation_metadata(self) -> Pairs:
        return self._request.metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline_at is None else max(0.0, self._deadline_at - time.monotonic())

    def code(self) -> StatusCode | None:
        return self._code

    def trailing_metadata(self) -> Pairs:
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Adds to the answer's head, which is sent with the first body."""
        self._head += tuple(metadata)

    async def read(self) -> bytes | Argument:
        """The body, or the argument of a method that takes none; raises TooLargeError."""
        if self._argument is not None:
            return self._argument
        return await self.body.read()

    async def write(self, body: HttpBody) -> None:
        """Returns when the bytes are in the connection's buffer."""
        if self._is_reset:
            return
        if not self._has_begun:
            self._send_head(body.content_type)
        size = len(body.data)
        if self._unyielded + size > _AT_ONCE_BYTES or size > self._connection.room(self.stream_id):
            await self._write_in_pieces(body.data)
        elif size:
            self._unyielded += size
            self._connection.send_data(self.stream_id, body.data)

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str]] = ()
    ) -> NoReturn:
        """Ends the call with an error: its answer, where none has begun."""
        trailing = tuple(trailing_metadata)
        self._fail(from_metadata(code, details, dict(trailing), self._methods.hop), trailing)
        raise grpc.aio.AbortError

    # ------------------------------------------------------------------ the connection's side

    def begin(self) -> None:
        """Starts the task; an unknown path is answered at once."""
        target = self._methods.find(self._request.verb, self._request.path)
        loop = asyncio.get_running_loop()
        if target is None:
            self._task = loop.create_task(self._refuse(), name="http-call")
        else:
            method, served, self._argument = target
            self._error_body = method.error_body or self._error_body
            context = cast(Context, self)
            self._task = loop.create_task(served.serve(None, context), name="http-call")
        self._task.add_done_callback(self._end)
        if self._deadline_at is not None:
            left_s = self._deadline_at - time.monotonic()
            self._timer = loop.call_later(left_s, self._cancel_for, DeadlineError(PASSED))

    def wake(self) -> None:
        """There may be room to write."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def reset(self) -> None:
        """Cancels the task because the peer has reset the stream or closed the connection; nothing more is sent."""
        self._is_reset = True
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """Cancels the task because the server stops."""
        self._cancel_for(NotReadyError("the service stops"))

    # ------------------------------------------------------------------

    def _cancel_for(self, error: HeadraceError) -> None:
        if self._task is not None and not self._task.done():
            self._ended_by = self._ended_by or error
            self._task.cancel()

    async def _write_in_pieces(self, data: bytes) -> None:
        """Writes as the window opens, with a turn of the event loop after each piece."""
        connection, stream_id, at = self._connection, self.stream_id, 0
        while at < len(data) and not self._is_reset:
            room = connection.room(stream_id)
            if room > 0:
                connection.send_data(stream_id, data[at : at + room])
                at += room
                await asyncio.sleep(0)
                continue
            self._room = asyncio.get_running_loop().create_future()
            connection.wait_for_room(self)
            await self._room
        self._unyielded = 0

    async def _refuse(self) -> None:
        error = NotFoundError("unknown path or method")
        self._fail(error, error.trailing_metadata(self._methods.hop))

    def _send_head(self, content_type: str, end: bool = False) -> None:
        self._has_begun = True
        status, headers = "200", [("content-type", content_type)] if content_type else []
        for name, value in self._head:
            if name == HTTP_STATUS:
                status = value
            else:
                headers.append((name, as_metadata(value)))
        self._connection.send_headers(self.stream_id, [(":status", status), *headers], end)

    def _fail(self, error: HeadraceError, metadata: Pairs) -> None:
        self._code, self._trailing = error.status, metadata
        if self._is_reset or self._has_begun:
            return
        self._head += metadata
        body = self._error_body(error)
        self._send_head(_JSON)
        if len(body) <= self._connection.window(self.stream_id):
            self._connection.send_data(self.stream_id, body)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task = None
        error = self._error_of(task)
        if not self._is_reset:
            if error is not None:
                self._fail(error, error.trailing_metadata(self._methods.hop))
            self._send_end()
        self._connection.ended(self)

    def _error_of(self, task: asyncio.Task[Any]) -> HeadraceError | None:
        """The error of a task that ended without `abort`; None after an answer or an abort."""
        if task.cancelled():
            return self._ended_by or NotReadyError("the service stops")
        failure = task.exception()
        if failure is None or isinstance(failure, grpc.aio.AbortError):
            return None
        logger.error("a call by HTTP failed", exc_info=failure)
        return RequestFailedError("internal error")

    def _send_end(self) -> None:
        connection, stream_id = self._connection, self.stream_id
        self.body.acknowledge()
        if not self._has_begun:
            self._send_head("", end=True)
        elif self._code is None or not self._trailing:
            connection.end_stream(stream_id)
        else:
            status = (_GRPC_STATUS, str(self._code.value[0]))
            trailers = [(name, as_metadata(value)) for name, value in self._trailing]
            connection.send_headers(stream_id, [status, *trailers], end=True)
        if not self.body.is_complete:
            connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)
