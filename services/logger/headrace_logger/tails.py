"""Sends records to the calls of Tail as they are committed, by this logger or another one of the same database.

    async with tails.open(filters, caller) as tail:
        async for record in tail.records(reader): ...   # serialized

A tail reads the store in the order of commit, from its own position on: commits of this logger wake it, those of others
it finds within half a second. A slow reader misses nothing, and keeps no more than one page in memory.

The number of tails is limited, in all and for each caller; above the limit the tail that has been idle for longest is
closed, among those of the caller with most tails. After `end` every tail raises NotReadyError: its reader may retry
once the logger runs again.

Owned by the event loop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from headrace.errors import HeadraceError, NotReadyError, OverloadedError
from headrace_logger.read_limits import COME_BACK_MS, Reader
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store

MAX_TAILS, MAX_TAILS_OF_ONE = 64, 48
_POLL_S = 0.5


class OpenTail:
    """The position of one reader."""

    def __init__(self, store: Store, filters: Filters, caller: str, position: int) -> None:
        self.caller = caller
        self.idle_since = time.monotonic()
        self.is_waiting = False
        self._store = store
        self._filters = filters
        self._position = position
        self._changed = asyncio.Event()
        self._error: HeadraceError | None = None

    async def records(self, reader: Reader) -> AsyncGenerator[bytes, None]:
        """The serialized records, each as long as `reader` lends its memory; raises the error that ends the tail."""
        while self._error is None:
            self._changed.clear()
            before = self._position
            with suppress(NotReadyError):  # The database may answer again.
                rows, self._position = await self._store.committed(self._filters, before)
                async for record in self._store.bodies(self._filters, rows, reader):
                    self.idle_since = time.monotonic()
                    yield record
            if self._position == before:
                await self._wait()
        raise self._error

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: HeadraceError) -> None:
        self._error = error
        self._changed.set()

    async def _wait(self) -> None:
        self.is_waiting = True
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)
        finally:
            self.is_waiting = False


class Tails:
    """All open tails of a store."""

    def __init__(self, store: Store, max_tails: int = MAX_TAILS, max_of_one: int = MAX_TAILS_OF_ONE) -> None:
        self._store = store
        self._max_tails = max_tails
        self._max_of_one = max_of_one
        self._open: set[OpenTail] = set()
        self._ended = False
        store.on_append(self._wake)

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(self, filters: Filters, caller: str = "") -> AsyncIterator[OpenTail]:
        """Opens a tail of the records that are committed from now on."""
        position = await self._store.newest_position()
        if self._ended:
            raise _stopping()
        self._make_room(caller)
        tail = OpenTail(self._store, filters, caller, position)
        self._open.add(tail)
        try:
            yield tail
        finally:
            self._open.discard(tail)

    def end(self) -> None:
        """Ends every tail, and refuses new ones."""
        self._ended = True
        for tail in self._open:
            tail.fail(_stopping())

    def _wake(self) -> None:
        for tail in self._open:
            tail.wake()

    def _make_room(self, caller: str) -> None:
        """Closes a tail for a caller's new one, if the limit requires it; raises OverloadedError if none is idle."""
        of = Counter(tail.caller for tail in self._open)
        if of[caller] >= self._max_of_one:
            greediest = caller
        elif len(self._open) >= self._max_tails:
            [(greediest, _)] = of.most_common(1)
        else:
            return
        # A tail whose reader does not read cannot be closed: it waits for the reader.
        idle = (tail for tail in self._open if tail.is_waiting and tail.caller == greediest)
        tail = min(idle, key=lambda one: one.idle_since, default=None)
        if tail is None:
            # Without the number of other callers' tails, which is not public.
            most = f"at most {self._max_tails} may be, {self._max_of_one} of one"
            message = f"too many tails are open, {of[caller]} of them of this caller; {most}"
            raise OverloadedError(message, retry_after_ms=COME_BACK_MS)
        self._open.discard(tail)
        tail.fail(
            OverloadedError("too many tails are open: a newer one replaced this one", retry_after_ms=COME_BACK_MS)
        )


def _stopping() -> NotReadyError:
    return NotReadyError("the logger is stopping")
