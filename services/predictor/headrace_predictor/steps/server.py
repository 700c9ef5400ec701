"""The port of generations, for transformers only (steps.proto, headrace/frames.py): the gateway does not route it.

It is the fourth port after the one of gRPC (headrace/endpoints.py).
"""

import asyncio
import logging
from contextlib import ExitStack

from headrace.errors import StartupError
from headrace.rpc.server.listeners import reserved
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.steps.session import TransformerSession

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_LAST_ANSWERS_S = 0.5  # For the last bytes of sequences that are cancelled.


class StepsServer:
    """Has one session for each connection. `stopping` is set when the process accepts no new calls.

    The port is exclusive unless `shares_port`: then several processes listen on it, and their parent has reserved it.
    """

    def __init__(self, repository: ModelRepository, stopping: asyncio.Event, shares_port: bool = False) -> None:
        self._repository = repository
        self._stopping = stopping
        self._shares_port = shares_port
        self._held = ExitStack()
        self._listening: asyncio.Server | None = None
        self._sessions: dict[asyncio.Future[None], TransformerSession] = {}
        self._stop: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Opens the port, 0 for any, and returns it; raises StartupError where it is taken."""
        if not self._shares_port:
            port = self._held.enter_context(reserved(host, port))
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._open, host.strip("[]"), port, reuse_port=True
            )
        except (OSError, OverflowError):
            raise StartupError(f"{host}:{port} cannot be listened on: is the port taken?") from None
        self._stop = asyncio.create_task(self._end_sessions(), name="steps-stop")
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Returns when the sessions have ended, which end by themselves once the process stops, or after `grace_s`."""
        if self._listening is not None:
            self._listening.close()
        for session in self._sessions.values():
            session.send_soon()
        if self._sessions:
            await asyncio.wait(tuple(self._sessions), timeout=grace_s)
        for session in self._sessions.values():
            session.connection.close()
        if self._sessions:
            await asyncio.wait(tuple(self._sessions), timeout=_LAST_ANSWERS_S)
        for session in tuple(self._sessions.values()):
            session.connection.abort()
        if self._stop is not None:
            self._stop.cancel()
        self._held.close()

    def _open(self) -> asyncio.Protocol:
        if len(self._sessions) >= _MAX_CONNECTIONS:
            logger.warning("a connection is refused: %d are open", len(self._sessions))
            return _Refusal()
        session = TransformerSession(self._repository, self._stopping)
        ended = session.connection.ended
        self._sessions[ended] = session
        ended.add_done_callback(self._sessions.pop)
        return session.connection

    async def _end_sessions(self) -> None:
        await self._stopping.wait()
        for session in self._sessions.values():
            session.send_soon()


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
