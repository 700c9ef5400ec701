"""An HTTP/2 server without TLS, for the gateway, with the life of a gRPC server.

`start` opens the port. `stop` sends GOAWAY on each connection and returns when their calls have ended; it cancels calls
that are still running after `grace_s`. The port is exclusive unless `shares_port`: then several processes listen on it,
and their parent has reserved it.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import ExitStack

from headrace.errors import StartupError
from headrace.rpc.http2.connection import HttpConnection
from headrace.rpc.http2.exchange import HttpExchange
from headrace.rpc.http2.request import ErrorBody, HttpMethod, MethodTable
from headrace.rpc.server.handlers import Interceptor
from headrace.rpc.server.listeners import reserved

logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]

MAX_CONNECTIONS = 1024  # As many as a gateway opens (envoy/envoy.yaml).
_BACKLOG = 1024
_LAST_ANSWERS_S = 0.5  # For the last bytes of calls that are cancelled.


class HttpServer:
    """REST by the same handlers as gRPC. Owned by the event loop."""

    def __init__(self, interceptor: Interceptor, error_body: ErrorBody, shares_port: bool = False) -> None:
        self._methods = MethodTable(interceptor, error_body)
        self.port = 0  # Once it is open.
        self._shares_port = shares_port
        self._held = ExitStack()
        self._listening: asyncio.Server | None = None
        self._connections: set[HttpConnection] = set()
        self._are_closed = asyncio.Event()  # All connections.
        self._are_closed.set()

    def add(self, *methods: HttpMethod) -> None:
        self._methods.add(*methods)

    async def start(self, host: str, port: int) -> int:
        """Opens the port, 0 for any, and returns it; raises StartupError where it is taken."""
        if not self._shares_port:
            port = self._held.enter_context(reserved(host, port))
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: HttpConnection(self), host.strip("[]"), port, reuse_port=True, backlog=_BACKLOG
            )
        except OSError:
            raise StartupError(f"{host}:{port} cannot be listened on: is the port taken?") from None
        self.port = self._listening.sockets[0].getsockname()[1]
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Stops; a second call with less grace shortens the first."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for connection in tuple(self._connections):
            connection.go_away()
        if not await self._ended(grace_s):
            for connection in tuple(self._connections):
                connection.cancel_calls()
                connection.end_arrivals()
            if not await self._ended(_LAST_ANSWERS_S):
                for connection in tuple(self._connections):
                    connection.abort()
        self._held.close()

    async def _ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._are_closed.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------ of the connections

    def open_stream(self, connection: HttpConnection, stream_id: int, headers: Headers) -> HttpExchange:
        return HttpExchange(connection, stream_id, headers, self._methods)

    def opened(self, connection: HttpConnection) -> bool:
        """Counts one more connection; False if there are too many."""
        if len(self._connections) >= MAX_CONNECTIONS or self._listening is None:
            logger.warning("a connection is refused: %d are open", len(self._connections))
            return False
        self._connections.add(connection)
        self._are_closed.clear()
        return True

    def closed(self, connection: HttpConnection) -> None:
        """A connection is closed, and the tasks of its calls have ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._are_closed.set()
