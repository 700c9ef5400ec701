"""An HTTP server that accepts or refuses CloudEvents, as the test wants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cloudevents.core.bindings.http import HTTPMessage, from_http_event

# The sink's answer to an event: a status and headers.
Answer = tuple[int, dict[str, str]]
ACCEPTED: Answer = (202, {})


class SinkServer:
    """Listens on a port that outlives restarts; `taken` are the events that it answered with 2xx, in order."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.path = "/events"
        # The SDK parses the event, and refuses a malformed one.
        self.read: Callable[[dict[str, str], bytes], Any] = lambda *message: from_http_event(HTTPMessage(*message))
        self.tries = 0
        self.at_once = 0  # The largest number of events in flight.
        self.answer: Callable[[Any], Awaitable[Answer]] = self._accept
        self.body = b""  # The body of each answer.
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}{self.path}"

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(source, id) of the events that it accepted."""
        return [(event.get_source(), event.get_id()) for event in self.taken]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Breaks every connection and stops listening."""
        assert self._server is not None
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, event: Any) -> Answer:
        return ACCEPTED

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            while True:
                await self._serve_one(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").splitlines()
        assert head[0] == f"POST {self.path} HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in headers.items()}
        event = self.read(headers, await reader.readexactly(int(headers["content-length"])))
        self.tries += 1
        self._open += 1
        self.at_once = max(self.at_once, self._open)
        try:
            status, extra = await self.answer(event)
        finally:
            self._open -= 1
        if 200 <= status < 300:
            self.taken.append(event)
        lines = [f"HTTP/1.1 {status} Scripted", f"content-length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in extra.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + self.body)
        await writer.drain()
