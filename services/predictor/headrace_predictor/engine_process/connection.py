"""The front's end of an engine's socket, on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from headrace.errors import StartupError, StartupFault
from headrace_predictor.engine_process.framing import Frames, framed
from headrace_protos import engine_pb2

logger = logging.getLogger(__name__)


class EngineConnection(asyncio.Protocol):
    """Waits for the first frame, then delivers the others; `name` is the model's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.frames = 0  # That have arrived.
        self._first: asyncio.Future[engine_pb2.EngineFrame] = asyncio.get_running_loop().create_future()
        self._unparsed = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._take: Callable[[engine_pb2.EngineFrame], None] | None = None
        self._lost: Callable[[], None] | None = None
        self._is_lost = False

    async def ready(self) -> engine_pb2.EngineFacts:
        """What the process reports of its model; raises StartupError."""
        frame = await self._first
        if frame.HasField("ready"):
            return frame.ready
        raise (StartupFault if frame.is_fault else StartupError)(frame.startup_error)

    def deliver(self, take: Callable[[engine_pb2.EngineFrame], None], lost: Callable[[], None]) -> None:
        """Calls `take` for each further frame and, once, `lost` when the socket has closed."""
        self._take, self._lost = take, lost
        if self._is_lost:
            asyncio.get_running_loop().call_soon(lost)

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the process has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def end(self) -> None:
        """Lets the process end; its end of the socket closes then."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unparsed.feed(data):
                self.frames += 1
                frame = engine_pb2.EngineFrame.FromString(message)
                if not self._first.done():
                    self._first.set_result(frame)
                elif self._take is not None:
                    self._take(frame)
        except Exception:
            logger.critical("an engine's frame cannot be read", exc_info=True)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if not self._first.done():
            self._first.set_exception(
                StartupFault(f"model {self._name}: its engine process ended while it loaded; see the log")
            )
            self._first.exception()  # It may have no waiter.
        if self._lost is not None:
            self._lost()
