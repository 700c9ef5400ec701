"""Fair shares of engines between clients: who waits here gets the next place by weight, and not by arrival.

An engine serves whatever it has in the order of its own, so it gets no more requests than it can run at a time; the
others wait here. Of the clients that wait, the next place is for the one with the fewest requests at the engines by its
weight. Owned by the event loop.
"""

import asyncio
from collections import Counter, deque
from contextlib import ExitStack
from math import inf

from headrace.errors import OverloadedError

_MAX_WAITING = 2048
_RETRY_AFTER_MS = 1000


class FairPlaces:
    """`limit` is how many requests the engines run at a time; it may change.

    With 0 no engine answers, and nobody waits here.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[float, asyncio.Future[None]]]] = {}  # Weights and turns by client.

    @property
    def waiting(self) -> int:
        """How many wait; on any thread."""
        return sum(map(len, tuple(self._waiting.values())))

    async def take(self, client: str, weight: float) -> ExitStack:
        """A place for a request, once there is one, until it is closed; raises OverloadedError where too many wait."""
        if self._waiting or not self._has_room():
            await self._wait(client, weight or 1.0)
        else:
            self._running[client] += 1
        place = ExitStack()
        place.callback(self.give_back, client)
        return place

    async def _wait(self, client: str, weight: float) -> None:
        if self.waiting >= _MAX_WAITING:
            raise OverloadedError(f"{_MAX_WAITING} requests wait for an engine", retry_after_ms=_RETRY_AFTER_MS)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(client)
            elif left := [one for one in self._waiting.get(client, ()) if one[1] is not turn]:
                self._waiting[client] = deque(left)
            else:
                self._waiting.pop(client, None)
            raise

    def serve(self) -> None:
        """Gives free places to those that wait."""
        while self._waiting and self._has_room():
            client = min(self._waiting, key=lambda name: self._running[name] / self._waiting[name][0][0])
            _, turn = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not turn.done():
                self._running[client] += 1
                turn.set_result(None)

    def give_back(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self.serve()

    def _has_room(self) -> bool:
        return self._running.total() < (self.limit or inf)
