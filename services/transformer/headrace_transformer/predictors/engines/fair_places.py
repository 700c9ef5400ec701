"""Fair shares of engines between clients: who waits here gets the next place by weight, and not by arrival.

An engine serves whatever it has in the order of its own, so it gets no more requests than it can run at a time; the
others wait here. Of the clients that wait, the next place is for the one with the fewest requests at the engines by its
weight. Owned by the event loop.
"""

import asyncio
from collections import Counter, deque
from contextlib import ExitStack
from math import inf
from typing import NamedTuple

from headrace.errors import OverloadedError

_MAX_WAITING = 2048
_RETRY_AFTER_MS = 1000


class _Turn(NamedTuple):
    weight: float
    came: asyncio.Future[None]


class FairPlaces:
    """`limit` is how many requests the engines run at a time; it may change.

    With 0 no engine answers, and nobody waits here.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Turn]] = {}

    @property
    def waiting(self) -> int:
        """How many wait; on any thread."""
        return sum(map(len, tuple(self._waiting.values())))

    @property
    def _has_room(self) -> bool:
        return self._running.total() < (self.limit or inf)

    async def take(self, client: str, weight: float) -> ExitStack:
        """A place for a request, once there is one, until it is closed; raises OverloadedError where too many wait."""
        if self._waiting or not self._has_room:
            await self._turn(client, weight)
        else:
            self._running[client] += 1
        place = ExitStack()
        place.callback(self.give_back, client)
        return place

    async def _turn(self, client: str, weight: float) -> None:
        if self.waiting >= _MAX_WAITING:
            raise OverloadedError("too many requests wait for an engine", retry_after_ms=_RETRY_AFTER_MS)
        turn = _Turn(weight or 1.0, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(turn)
        self.serve()
        try:
            await turn.came
        except asyncio.CancelledError:
            if turn.came.cancelled():
                self._remove(client, turn)
            else:
                self.give_back(client)
            raise

    def serve(self) -> None:
        """Gives free places to those that wait."""
        while self._waiting and self._has_room:
            client = min(self._waiting, key=lambda name: self._running[name] / self._waiting[name][0].weight)
            turn = self._waiting[client][0]
            self._remove(client, turn)
            if not turn.came.done():
                self._running[client] += 1
                turn.came.set_result(None)

    def give_back(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self.serve()

    def _remove(self, client: str, turn: _Turn) -> None:
        turns = self._waiting.get(client)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]
