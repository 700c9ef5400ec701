"""One bidirectional call of gRPC at a server: messages as they arrive, and a function that writes one.

Its task runs until it returns, or raises a HeadraceError, which becomes the call's status, its message and its
metadata, as with gRPC's servers. `write` returns when the message is in the connection's buffer; it waits while the
peer's window is closed.

Source: gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from grpc import StatusCode
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from headrace.errors import (
    HeadraceError,
    InvalidRequestError,
    NotImplementedMethodError,
    NotReadyError,
    RequestFailedError,
)
from headrace.rpc.http2.messages import MessageReader, with_prefix
from headrace.rpc.http2.request import read_head
from headrace.rpc.http2.served_call import ServedCall
from headrace.telemetry.identity import as_metadata

if TYPE_CHECKING:
    from headrace.rpc.http2.connection import HttpConnection

logger = logging.getLogger(__name__)

Behaviour = Callable[[AsyncIterator[bytes], Callable[[bytes], Awaitable[None]]], Awaitable[None]]

_HEAD = ((":status", "200"), ("content-type", "application/grpc"))
_UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class RequestMessages:
    """The messages of a call; at most one window of them waits. `acknowledge` as in request.py."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self.is_complete = False
        self._acknowledge = acknowledge
        self._unread = 0  # Bytes that are not acknowledged.
        self._reader = MessageReader()
        self._messages: deque[bytes] = deque()
        self._failure: HeadraceError | None = None
        self._arrival: asyncio.Future[None] | None = None

    def receive(self, data: bytes, size: int) -> None:
        """A piece, which took `size` bytes of the window."""
        self._unread += size
        if self._failure is None:
            try:
                self._messages.extend(self._reader.receive(data))
            except ProtocolError as error:
                self._failure = InvalidRequestError(str(error))
        self._wake()

    def complete(self) -> None:
        """Marks the end."""
        self.is_complete = True
        if not self._reader.is_between:
            self._failure = self._failure or InvalidRequestError("the call ends within a message")
        self._wake()

    def acknowledge(self) -> None:
        """Opens the window by the bytes received."""
        unread, self._unread = self._unread, 0
        self._acknowledge(unread)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """The next message; raises InvalidRequestError for one that cannot be read."""
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self.is_complete:
                raise StopAsyncIteration
            self.acknowledge()
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class MessageCall(ServedCall):
    """See the module."""

    def __init__(
        self,
        connection: HttpConnection,
        stream_id: int,
        headers: Iterable[tuple[bytes, bytes]],
        methods: Mapping[str, Behaviour],
        hop: str,
    ) -> None:
        super().__init__(connection, stream_id)
        self._messages = RequestMessages(partial(connection.acknowledge, stream_id))
        self._path = read_head(headers).path
        self._methods = methods
        self._hop = hop

    @property
    def body(self) -> RequestMessages:
        return self._messages

    def begin(self) -> None:
        """Starts the task; an unknown path is answered at once."""
        self._connection.send_headers(self.stream_id, _HEAD)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="message-call")
        self._task.add_done_callback(self._end)

    async def _run(self) -> None:
        behaviour = self._methods.get(self._path)
        if behaviour is None:
            raise NotImplementedMethodError(f"{self._path} is not implemented")
        await behaviour(self._messages, self._write)

    async def _write(self, message: bytes) -> None:
        if not self._is_reset:
            await self._write_bytes(with_prefix(message))

    def _end(self, task: asyncio.Task[None]) -> None:
        error = self._error_of(task)
        self._task = None
        if not self._is_reset:
            self._send_status(error)
        self._connection.ended(self)

    def _error_of(self, task: asyncio.Task[None]) -> HeadraceError | None:
        if task.cancelled():
            return self._ended_by or NotReadyError("the service stops")
        failure = task.exception()
        if failure is None or isinstance(failure, HeadraceError):
            return failure
        logger.error("%s failed", self._path, exc_info=failure)
        return RequestFailedError("internal error")

    def _send_status(self, error: HeadraceError | None) -> None:
        status = StatusCode.OK if error is None else error.status
        trailers = [("grpc-status", str(status.value[0]))]
        if error is not None:
            trailers.append(("grpc-message", quote(error.message, safe=_UNESCAPED)))
            trailers += [(name, as_metadata(value)) for name, value in error.trailing_metadata(self._hop)]
        self._messages.acknowledge()
        self._connection.send_headers(self.stream_id, trailers, end=True)
        if not self._messages.is_complete:
            self._connection.reset_stream(self.stream_id, ErrorCodes.NO_ERROR)
