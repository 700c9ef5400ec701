"""One request on an HTTP/2 connection, as the context that handlers know from gRPC, and the task that serves it.

Of `grpc.aio.ServicerContext` it has what handlers, telemetry and admission use: metadata, deadline, `read` of the one
message, which is the body, `write` of HttpBody messages, `abort`. The metadata `x-http-status` of an answer's head is
its status. An error before the first byte has the body of its API, one after it has metadata in the trailers.

`write` returns when the bytes are in the connection's buffer; it waits while the reader's window is closed or the
socket is full, so that what makes the answer waits too. A body is held up to MAX_MESSAGE_BYTES, and before it is read
no more of it comes than a stream's window.

The deadline is gRPC's header, which the gateway sets for REST as well; it cancels the task, as a reset does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import grpc
from google.api.httpbody_pb2 import HttpBody
from grpc import StatusCode
from h2.errors import ErrorCodes

from millrace.deadline import PASSED
from millrace.errors import (
    HTTP_STATUS,
    DeadlineError,
    MillraceError,
    NotFoundError,
    NotReadyError,
    TooLargeError,
    from_metadata,
)
from millrace.rpc.byte_budget import MAX_MESSAGE_BYTES
from millrace.rpc.handlers import Context
from millrace.rpc.http2.methods import ErrorBody, MethodTable
from millrace.telemetry.identity import as_metadata

if TYPE_CHECKING:
    from millrace.rpc.http2.connection import HttpConnection

_JSON = "application/json"
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = "grpc-timeout"
_NOT_METADATA = frozenset({_TIMEOUT, "te"})
# Written without a turn for others: many small pieces of one answer must not hold the event loop.
_AT_ONCE_BYTES = 16 * 1024

Pairs = tuple[tuple[str, str], ...]


class Terms(NamedTuple):
    """What is the same for all calls of a server: the hop that signs errors, and their bodies."""

    hop: str
    error_body: ErrorBody


class HttpCall:
    """Owned by the event loop; `begin` starts its task, and the connection is told when that has ended."""

    __slots__ = (
        "_argument",
        "_code",
        "_connection",
        "_deadline_at",
        "_ended_by",
        "_has_begun",
        "_head",
        "_is_received",
        "_is_reset",
        "_metadata",
        "_path",
        "_pieces",
        "_reader",
        "_room",
        "_size",
        "_task",
        "_terms",
        "_timer",
        "_trailing",
        "_unyielded",
        "_verb",
        "stream_id",
        "unread",
    )

    def __init__(
        self, connection: HttpConnection, stream_id: int, terms: Terms, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._terms = terms
        self._verb = self._path = ""
        self._deadline_at: float | None = None  # Of the monotonic clock.
        self._metadata = self._read_headers(headers)
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended_by: MillraceError | None = None  # What the server cancels the task for.
        self._is_reset = False  # By the peer, or with the connection: nothing can be sent.
        # The request.
        self._argument: bytes | None = None  # The message of a method that takes no body.
        self._pieces: list[bytes] = []
        self._size = 0
        self.unread = 0  # Bytes that are not acknowledged, frames and padding included.
        self._is_received = False
        self._reader: asyncio.Future[None] | None = None
        # The answer.
        self._head: Pairs = ()
        self._has_begun = False
        self._code: StatusCode | None = None
        self._trailing: Pairs = ()
        self._room: asyncio.Future[None] | None = None
        self._unyielded = 0

    # ------------------------------------------------------------------ the context of a handler

    def invocation_metadata(self) -> Pairs:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline_at is None else max(0.0, self._deadline_at - time.monotonic())

    def code(self) -> StatusCode | None:
        return self._code

    def trailing_metadata(self) -> Pairs:
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """What the answer's head has; it goes out with the first body."""
        self._head += tuple(metadata)

    async def read(self) -> bytes:
        """The body, or what the path names instead; raises TooLargeError."""
        if self._argument is not None:
            return self._argument
        while not self._is_received:
            self._acknowledge()
            self._check_size()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._acknowledge()
        self._check_size()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def write(self, body: HttpBody) -> None:
        if self._is_reset:
            return
        if not self._has_begun:
            self._send_head(body.content_type)
        data = body.data
        size = len(data)
        if self._unyielded + size > _AT_ONCE_BYTES or size > self._connection.room(self.stream_id):
            await self._write_in_pieces(data)
        elif size:
            self._unyielded += size
            self._connection.send_data(self.stream_id, data)

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str]] = ()
    ) -> NoReturn:
        """Ends the call with an error: its answer, where none has begun."""
        trailing = tuple(trailing_metadata)
        self._fail(from_metadata(code, details, dict(trailing), self._terms.hop), trailing)
        raise grpc.aio.AbortError

    # ------------------------------------------------------------------ the connection's side

    def begin(self, methods: MethodTable) -> None:
        """Starts the task; an unknown path is answered at once."""
        target = methods.find(self._verb, self._path)
        loop = asyncio.get_running_loop()
        if target is None:
            self._task = loop.create_task(self._refuse(), name="http-call")
        else:
            if not target.method.takes_body:
                self._argument = target.argument
            context = cast(Context, self)
            self._task = loop.create_task(target.served.serve(None, context), name="http-call")
        self._task.add_done_callback(self._end)
        if self._deadline_at is not None:
            left_s = self._deadline_at - time.monotonic()
            self._timer = loop.call_later(left_s, self._cancel_for, DeadlineError(PASSED))

    def receive(self, data: bytes, size: int) -> None:
        """A piece of the body, which took `size` bytes of the window."""
        self.unread += size
        if self._argument is None and self._size <= MAX_MESSAGE_BYTES:
            self._pieces.append(data)
            self._size += len(data)
        self._wake_reader()

    def received(self) -> None:
        """The body is complete."""
        self._is_received = True
        self._wake_reader()

    def wake(self) -> None:
        """There may be room to write."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def reset(self) -> None:
        """The peer has left: the task is cancelled, and nothing more is sent."""
        self._is_reset = True
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """The server stops."""
        self._cancel_for(NotReadyError("the service stops"))

    # ------------------------------------------------------------------

    def _read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
        metadata = []
        for raw_name, raw_value in headers:
            name = raw_name.decode("latin-1")
            try:
                value = raw_value.decode()
            except UnicodeDecodeError:
                value = raw_value.decode("latin-1")
            if name == ":path":
                self._path = value
            elif name == ":method":
                self._verb = value
            elif name == _TIMEOUT:
                timeout_s = _seconds(value)
                self._deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
            elif not name.startswith(":") and name not in _NOT_METADATA:
                metadata.append((name, value))
        return tuple(metadata)

    async def _refuse(self) -> None:
        error = NotFoundError("unknown path or method")
        self._fail(error, error.trailing_metadata(self._terms.hop))

    def _cancel_for(self, error: MillraceError) -> None:
        if self._task is not None and not self._task.done():
            self._ended_by = self._ended_by or error
            self._task.cancel()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_size(self) -> None:
        if self._size > MAX_MESSAGE_BYTES:
            self._pieces.clear()
            raise TooLargeError(f"the request is larger than {MAX_MESSAGE_BYTES >> 20} MiB")

    def _acknowledge(self) -> None:
        unread, self.unread = self.unread, 0
        self._connection.acknowledge(self.stream_id, unread)

    async def _write_in_pieces(self, data: bytes) -> None:
        """Writes as the window opens, and lets others have their turn between."""
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

    def _send_head(self, content_type: str, end: bool = False) -> None:
        self._has_begun = True
        status, headers = "200", [("content-type", content_type)] if content_type else []
        for name, value in self._head:
            if name == HTTP_STATUS:
                status = value
            else:
                headers.append((name, as_metadata(value)))
        self._connection.send_headers(self.stream_id, [(":status", status), *headers], end)

    def _fail(self, error: MillraceError, metadata: Pairs) -> None:
        self._code, self._trailing = error.status, metadata
        if self._is_reset or self._has_begun:
            return
        self._head += metadata
        body = self._terms.error_body(error)
        self._send_head(_JSON)
        if len(body) <= self._connection.room(self.stream_id):
            self._connection.send_data(self.stream_id, body)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        failure = None if task.cancelled() else task.exception()  # AbortError, or what has been logged.
        if not self._is_reset:
            if task.cancelled() or (failure is not None and self._code is None):
                error = self._ended_by or NotReadyError("the service stops")
                self._fail(error, error.trailing_metadata(self._terms.hop))
            self._send_end()
        self._connection.ended(self)

    def _send_end(self) -> None:
        connection, stream_id = self._connection, self.stream_id
        self._acknowledge()
        if not self._has_begun:
            self._send_head("", end=True)
        elif self._code in (None, StatusCode.OK) or not self._trailing:
            connection.end_stream(stream_id)
        else:
            trailers = [(name, as_metadata(value)) for name, value in self._trailing]
            connection.send_headers(stream_id, trailers, end=True)
        if not self._is_received:
            connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)


def _seconds(grpc_timeout: str) -> float | None:
    """gRPC's header, digits and a unit; None where it is neither."""
    digits, unit = grpc_timeout[:-1], grpc_timeout[-1:]
    if unit not in _UNIT_S or not (digits.isascii() and digits.isdecimal() and len(digits) <= 8):
        return None
    return int(digits) * _UNIT_S[unit]
