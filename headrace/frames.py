"""Messages on a stream socket: each after its length, four bytes, little-endian.

That is the wire between a transformer and a predictor (TCP, steps.proto) and between a predictor and its engine
processes (Unix sockets, engine.proto). There is no TLS and no authentication. On TCP both ends send at least every few
seconds, so that silence means that the peer is at fault; what the peer of a dead host is owed, TCP gives up by itself.

Here too: a HeadraceError as a message of steps.proto, and back.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import cast

from headrace import errors
from headrace.errors import HeadraceError, RequestFailedError
from headrace_protos.steps_pb2 import StepsError

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
_CONNECT_S = 2.0
MAX_FRAME_BYTES = 256 * 1024 * 1024  # A longer one is no frame.


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts the bytes of a stream into messages; raises ValueError for what is no frame."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that are complete with these bytes."""
        self._unread += data
        at = 0
        try:
            while len(self._unread) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread, at)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                begin, end = at + _LENGTH.size, at + _LENGTH.size + length
                if end > len(self._unread):
                    break
                at = end
                yield bytes(memoryview(self._unread)[begin:end])
        finally:
            del self._unread[:at]


def messages(connection: socket.socket) -> Iterator[bytes]:
    """The messages of a blocking socket until its other end closes."""
    frames = Frames()
    while data := connection.recv(_READ_BYTES):
        yield from frames.feed(data)


class FrameConnection(asyncio.Protocol):
    """One end of a socket, on the event loop.

    `receive` gets each message as it comes and must not block; what it raises ends the connection. `drained` is called
    once the connection is made, and each time `can_send` is true again. `ended` is done when the connection has closed,
    with what `receive` raised or the socket's error, if any.
    """

    def __init__(self, receive: Callable[[bytes], None], drained: Callable[[], None] | None = None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A connection whose owner has gone has no reader of its error, which asyncio would report.
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.received = 0  # Messages.
        self.receive = receive
        self._drained = drained
        self._unread = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._is_full = False  # The transport's buffer is above its limit.
        self._failure: Exception | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, receive: Callable[[bytes], None], drained: Callable[[], None]
    ) -> "FrameConnection":
        """Connects within 2 s; raises OSError, but no TimeoutError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(lambda: cls(receive, drained), host, port)
        except TimeoutError:
            raise ConnectionError(f"no connection to {host}:{port} within {_CONNECT_S:g} s") from None
        return connection

    @property
    def can_send(self) -> bool:
        """Whether the peer reads what was sent before; `send` beyond that is for the caller to bound."""
        return self._transport is not None and not self._is_full and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the system has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: bytes) -> None:
        """Sends a message; does nothing on a connection that has closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    def end(self) -> None:
        """Sends nothing more; the connection closes when the peer closes its end."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Closes the connection once all that was sent is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection without a wait for a peer that does not read."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if self._drained is not None:
            self._drained()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unread.feed(data):
                self.received += 1
                self.receive(message)
        except Exception as error:
            self._failure = error
            self.abort()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._drained is not None:
            self._drained()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.ended.done():
            return
        if (failure := self._failure or exc) is not None:
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)


_CLASSES = {
    name: error for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, HeadraceError)
}


def write_error(error: HeadraceError, this_hop: str) -> StepsError:
    """The message of an error that `this_hop` raises or passes on."""
    return StepsError(
        class_name=type(error).__name__,
        message=error.message,
        hop=error.hop or this_hop,
        retry_after_ms=error.retry_after_ms,
    )


def read_error(message: StepsError) -> HeadraceError:
    """The error that a message describes; RequestFailedError if its class is unknown."""
    error = _CLASSES.get(message.class_name, RequestFailedError)
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    return error(message.message, hop=message.hop or None, retry_after_ms=retry_after_ms)
