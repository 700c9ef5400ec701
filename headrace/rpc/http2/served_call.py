"""What every call on a server's connection has: a task, and writing as its windows open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError, NotReadyError

if TYPE_CHECKING:
    from headrace.rpc.http2.connection import HttpConnection

# Written within one turn of the event loop at most: many small pieces of one answer must not hold it.
_AT_ONCE_BYTES = 16 * 1024


class Body(Protocol):
    """A request's body as it arrives; `receive` gets a piece and the bytes that it took of the window."""

    def receive(self, data: bytes, size: int) -> None: ...

    def complete(self) -> None: ...

    def acknowledge(self) -> None: ...


class ServedCall:
    """Owned by the event loop; `begin` starts its task, at whose end `HttpConnection.ended` is called."""

    def __init__(self, connection: HttpConnection, stream_id: int) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._task: asyncio.Task[Any] | None = None
        self._ended_by: HeadraceError | None = None  # Why the server has cancelled the task.
        self._is_reset = False  # By the peer, or with the connection: nothing can be sent.
        self._room: asyncio.Future[None] | None = None
        self._unyielded = 0

    @property
    def body(self) -> Body:
        raise NotImplementedError

    def begin(self) -> None:
        """Starts the task."""
        raise NotImplementedError

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

    async def _write_bytes(self, data: bytes) -> None:
        """Returns when the bytes are in the connection's buffer."""
        size = len(data)
        if self._unyielded + size > _AT_ONCE_BYTES or size > self._connection.room(self.stream_id):
            await self._write_in_pieces(data)
        elif size:
            self._unyielded += size
            self._connection.send_data(self.stream_id, data)

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
