"""One connection of HTTP/2 without TLS: makes calls of the frames that arrive, and sends what the calls write.

The `h2` library has the protocol's state (protocol.py). All calls of a connection share one write to the socket for
each turn of the event loop, so that a peer with many streams reads its socket once for many messages.

Bounded are: streams, unread bytes of a body, headers (protocol.py). While the socket's buffer is full, calls wait and
the connection is not read either, so that a flood of pings or settings cannot make a queue of answers. A protocol error
ends the connection with GOAWAY and the error's code. A silent peer is pinged; without an answer its connection is
aborted.

Source: RFC 9113; https://python-hyper.org/projects/h2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import NoSuchStreamError, ProtocolError
from hyperframe.frame import GoAwayFrame

from headrace.rpc.http2.protocol import ProtocolState
from headrace.rpc.http2.request import RequestBody

logger = logging.getLogger(__name__)

_UNSENT_BYTES = 64 * 1024  # What waits for the end of a turn at most.
_SILENT_S = 20.0  # After that a peer is pinged, and after that again it is dead.
_GO_AWAY_S = 1.0  # For the answer to the ping behind a GOAWAY.
_LAST_STREAM_ID = 2**31 - 1
_ALIVE, _GONE = b"is alive", b"going aw"

Headers = Sequence[tuple[str, str]]


class Stream(Protocol):
    """A request and its answer: `begin` starts its task, at whose end `HttpConnection.ended` is called."""

    stream_id: int
    body: RequestBody

    def begin(self) -> None: ...

    def wake(self) -> None: ...

    def reset(self) -> None: ...

    def cancel(self) -> None: ...


class Owner(Protocol):
    """The server of connections; `opened` is False if there are too many."""

    def opened(self, connection: HttpConnection) -> bool: ...

    def open_stream(self, connection: HttpConnection, stream_id: int, headers: Any) -> Stream: ...

    def closed(self, connection: HttpConnection) -> None: ...


class HttpConnection(asyncio.Protocol):
    """Owned by the event loop."""

    def __init__(self, server: Owner) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._http2 = ProtocolState()
        self._transport: asyncio.Transport | None = None  # While it is open.
        self._calls: dict[int, Stream] = {}
        self._waiting: set[Stream] = set()  # For room to write.
        self._unsent = 0  # Bytes of calls since the last flush, about.
        self._flush_is_due = False
        self._is_full = False  # The socket takes no more.
        self._goes_away = self._is_last = False  # GOAWAY is sent; and no new stream can come any more.
        self._is_over = False  # After a protocol error or the peer's GOAWAY: h2 sends nothing more.
        self._is_silent = self._is_pinged = False
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._server.opened(self):
            self._transport.abort()
            return
        self._flush()
        self._timer = self._loop.call_later(_SILENT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._reset_calls()
        if not self._calls:
            self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        self._is_silent = self._is_pinged = False
        try:
            for event in self._http2.receive_data(data):
                self._handle(event)
        except ProtocolError as error:
            logger.warning("an HTTP/2 connection broke the protocol: %s", error)
            self._close()
        except Exception:
            logger.exception("an HTTP/2 connection cannot be read")
            self._close()
        else:
            self._flush_soon()

    def pause_writing(self) -> None:
        self._is_full = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = self._is_silent = self._is_pinged = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._wake_all()

    # ------------------------------------------------------------------ of its calls

    def room(self, stream_id: int) -> int:
        """Bytes that a stream may write now, in one frame."""
        return 0 if self._is_full else self.window(stream_id)

    def window(self, stream_id: int) -> int:
        """Bytes that the windows of stream and connection allow now, in one frame."""
        http2 = self._http2
        return min(http2.local_flow_control_window(stream_id), http2.max_outbound_frame_size)

    def send_headers(self, stream_id: int, headers: Headers, end: bool = False) -> None:
        """The head of an answer, or its trailers."""
        self._http2.send_headers(stream_id, headers, end)
        self._flush_soon()

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Bytes for which there is room."""
        self._http2.write_data(stream_id, data)
        self._unsent += len(data)
        if self._unsent > _UNSENT_BYTES:
            self._flush()
        else:
            self._flush_soon()

    def end_stream(self, stream_id: int) -> None:
        self._http2.end_stream(stream_id)
        self._flush_soon()

    def reset_stream(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(NoSuchStreamError):  # The peer has reset it meanwhile.
            self._http2.reset_stream(stream_id, code)
        self._flush_soon()

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Opens the windows by so many bytes, padding included, that have been read."""
        if size and not self._is_over:
            self._http2.acknowledge_received_data(size, stream_id)
            self._flush_soon()

    def wait_for_room(self, call: Stream) -> None:
        """Has `call.wake` called when there may be room."""
        self._waiting.add(call)

    def ended(self, call: Stream) -> None:
        """The call's task has ended, and with it the call."""
        self._calls.pop(call.stream_id, None)
        self._waiting.discard(call)
        if self._transport is not None:
            self._close_if_done()
        elif not self._calls:
            self._server.closed(self)

    # ------------------------------------------------------------------ of the server

    def go_away(self) -> None:
        """Sends GOAWAY; streams that the peer begins before it has read that are still served."""
        if self._goes_away or self._is_over or self._transport is None:
            return
        self._goes_away = True
        self._send_go_away(_LAST_STREAM_ID)
        self._http2.ping(_GONE)
        self._flush()
        self._loop.call_later(_GO_AWAY_S, self.end_arrivals)

    def end_arrivals(self) -> None:
        """Refuses new streams from now on; closes the connection when the last one has ended."""
        if self._is_last or self._transport is None:
            return
        self._is_last = True
        self._send_go_away(self._http2.highest_inbound_stream_id)
        self._close_if_done()

    def cancel_calls(self) -> None:
        for call in tuple(self._calls.values()):
            call.cancel()

    def close(self) -> None:
        """Sends what has been written, and closes."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.DataReceived():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.body.receive(event.data, event.flow_controlled_length)
                else:
                    self.acknowledge(event.stream_id, event.flow_controlled_length)
            case events.RequestReceived():
                self._begin(event.stream_id, event.headers)
            case events.StreamEnded():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.body.complete()
            case events.StreamReset():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.reset()
                    call.body.acknowledge()
            case events.WindowUpdated():
                if not event.stream_id:
                    self._wake_all()
                elif (call := self._calls.get(event.stream_id)) is not None and call in self._waiting:
                    self._waiting.discard(call)
                    call.wake()
            case events.RemoteSettingsChanged():
                self._wake_all()
            case events.PingAckReceived():
                if self._goes_away and event.ping_data == _GONE:
                    self.end_arrivals()
            case events.ConnectionTerminated():
                # h2 sends nothing after a peer's GOAWAY, so the calls cannot finish. Envoy drains a connection without
                # one: it begins no more streams and lets those that run finish.
                self._close()

    def _begin(self, stream_id: int, headers: Any) -> None:
        if self._is_last:
            self.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        call = self._server.open_stream(self, stream_id, headers)
        self._calls[stream_id] = call
        call.begin()

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for call in waiting:
            call.wake()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due, self._unsent = False, 0
        data = self._http2.data_to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _close(self) -> None:
        """Cancels the calls and closes the connection, with the GOAWAY that h2 has prepared."""
        self._is_over = True
        self._reset_calls()
        self.close()

    def _reset_calls(self) -> None:
        for call in tuple(self._calls.values()):
            call.reset()

    def _send_go_away(self, last_stream_id: int) -> None:
        # Not by h2, which treats a connection as closed after it has sent one.
        if self._transport is not None and not self._transport.is_closing():
            self._flush()
            self._transport.write(GoAwayFrame(last_stream_id=last_stream_id).serialize())

    def _close_if_done(self) -> None:
        if self._is_last and not self._calls:
            self.close()

    def _look(self) -> None:
        """Pings a silent peer; aborts the connection of one that does not answer or does not read."""
        if self._transport is None:
            return
        if self._is_pinged or self._transport.is_closing():
            logger.info("a peer by HTTP/2 does not answer: its connection is aborted")
            self._transport.abort()
            return
        if self._is_silent:
            self._is_pinged = True
            self._http2.ping(_ALIVE)
            self._flush()
        self._is_silent = True
        self._timer = self._loop.call_later(_SILENT_S, self._look)
