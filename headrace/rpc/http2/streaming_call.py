"""One bidirectional call of gRPC on an HTTP/2 connection of its own, read and written by the event loop.

For a call that lasts as long as both of its processes and carries hundreds of small messages a second: grpc.aio reads
on other threads, and wakes the event loop by a socket for each message. There is no TLS, no metadata, no compression
and no deadline here.

`receive` gets each message as it comes and must not block; what it raises ends the call. `ended` has the status, or
raises CallBrokenError or what `receive` raised; `close` cancels it. The owner calls `close` in every case: a call that
has ended keeps its connection.

Source: gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md); RFC 9113.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import unquote

from grpc import StatusCode
from h2 import events
from h2.exceptions import ProtocolError

from headrace.rpc.http2.messages import MessageReader, with_prefix
from headrace.rpc.http2.protocol import ClientState

_CONNECT_S = 2.0
_STREAM = 1
_STATUS = {str(code.value[0]): code for code in StatusCode}


class CallBrokenError(Exception):
    """The call ended without a status: it could not begin, the connection broke, or the peer broke the protocol."""


class StreamingCall(asyncio.Protocol):
    """Owned by the event loop; made by `open`, and ended by the peer or by `close`."""

    def __init__(
        self, authority: str, path: str, receive: Callable[[bytes], None], drained: Callable[[], None]
    ) -> None:
        self.ended: asyncio.Future[tuple[StatusCode, str]] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(_mark_retrieved)
        self._authority, self._path = authority, path
        self._receive, self._drained = receive, drained
        self._http2 = ClientState()
        self._transport: asyncio.Transport | None = None
        self._has_begun = False
        self._reader = MessageReader()
        self._headers: dict[str, str] = {}
        self._unsent = bytearray()
        self._is_full = False  # The transport's buffer is above its limit.

    @classmethod
    async def open(
        cls, address: str, path: str, receive: Callable[[bytes], None], drained: Callable[[], None]
    ) -> StreamingCall:
        """Connects to host:port. The call begins when the peer's settings have come, a wait that the caller must limit.

        `drained` is called then, and each time `send` may be called again. Raises CallBrokenError.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, call = await loop.create_connection(
                    lambda: cls(address, path, receive, drained), host.strip("[]"), int(port)
                )
        except OSError as error:  # A TimeoutError too.
            raise CallBrokenError(f"no connection: {error}") from error
        return call

    @property
    def can_send(self) -> bool:
        """Whether the call runs, and the transport has taken all that was sent before and takes more."""
        return self._has_begun and not self._unsent and not self._is_full and not self.ended.done()

    def send(self, message: bytes) -> None:
        """Sends a message; only when `can_send`."""
        self._unsent += with_prefix(message)
        self._write()

    def close(self) -> None:
        """Cancels the call by closing its connection, without a wait for a peer that does not read."""
        self.ended.cancel()
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(CallBrokenError(f"the connection broke: {exc}" if exc else "the peer closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for event in self._http2.receive_data(data):
                self._handle(event)
            self._write()
        except ProtocolError as error:
            self._fail(CallBrokenError(f"the peer breaks HTTP/2: {error}"))
        except Exception as error:
            self._fail(error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._unsent:
            self._write()
        else:
            self._notify_drained()

    # ------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.DataReceived():
                self._http2.acknowledge_received_data(event.flow_controlled_length, _STREAM)
                for message in self._reader.receive(event.data):
                    self._receive(message)
            case events.RemoteSettingsChanged():
                if not self._has_begun:  # The settings are known now, and so is that the peer speaks HTTP/2.
                    self._begin()
            case events.ResponseReceived() | events.TrailersReceived():
                self._note(event.headers)
            case events.StreamEnded():
                self._end()
            case events.StreamReset():
                self._fail(CallBrokenError(f"the peer reset the call: {event.error_code}"))
            case events.ConnectionTerminated():
                if not event.last_stream_id:
                    self._fail(CallBrokenError("the peer accepts no calls"))

    def _begin(self) -> None:
        self._has_begun = True
        self._http2.send_headers(
            _STREAM,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", self._path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "headrace"),
            ],
        )
        self._drained()

    def _note(self, headers: Iterable[Any]) -> None:
        self._headers |= dict(headers)
        if self._headers.get(":status") != "200":
            raise ProtocolError(f"HTTP status {self._headers.get(':status')}")

    def _end(self) -> None:
        code = _STATUS.get(self._headers.get("grpc-status", ""), StatusCode.UNKNOWN)
        if not self.ended.done():
            self.ended.set_result((code, unquote(self._headers.get("grpc-message", ""))))

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _write(self) -> None:
        """Sends what the windows and the transport take."""
        http2, had_unsent = self._http2, bool(self._unsent)
        while self._unsent and not self._is_full and not self.ended.done():
            room = min(http2.local_flow_control_window(_STREAM), http2.max_outbound_frame_size)
            if room <= 0:
                break
            http2.send_data(_STREAM, bytes(self._unsent[:room]))
            del self._unsent[:room]
            self._flush()
        self._flush()
        if had_unsent:
            self._notify_drained()

    def _notify_drained(self) -> None:
        if self.can_send:
            self._drained()

    def _flush(self) -> None:
        data = self._http2.data_to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _mark_retrieved(ended: asyncio.Future[tuple[StatusCode, str]]) -> None:
    """A call whose owner was cancelled meanwhile has no reader of its error, which asyncio would report."""
    if not ended.cancelled():
        ended.exception()
