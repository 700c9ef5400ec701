"""Shows records to the calls of Tail as they are committed.

    with tails.open(filters, caller) as tail:
        shown = await tail.next()

`show` takes new records and never waits. The newest records are kept once for all tails, within a bound; a tail has
only its position among them and its filters. A reader that falls behind the oldest kept record gets OverloadedError.
The number of tails is limited, in all and for each caller; above the limit the tail that has been idle for longest is
closed, among those of the caller with most tails. After `end` every tail raises NotReadyError: its reader may retry
once the logger runs again.

Owned by the event loop.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from headrace.errors import HeadraceError, NotReadyError, OverloadedError
from headrace_logger.read_limits import COME_BACK_MS
from headrace_logger.store.filters import Filters, columns_of
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import PayloadRecord

MAX_TAILS, MAX_TAILS_OF_ONE = 64, 48
MAX_KEPT = 1000
_MAX_KEPT_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 256 * 1024
_POLL_S = 0.5
_PAGE = 64
_TURN = 64  # Records that a tail examines before the event loop runs other tasks.


class Shown:
    """A committed record; what tails derive from it is computed once."""

    def __init__(self, record: PayloadRecord) -> None:
        self.record = record
        self.size = record.ByteSize()
        self._serialized: bytes | None = None

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        return columns_of(self.record)

    async def serialized(self) -> bytes:
        if self._serialized is None:
            write = self.record.SerializeToString
            self._serialized = await asyncio.to_thread(write) if self.size > _LARGE_BYTES else write()
        return self._serialized


class OpenTail:
    """The position of one reader."""

    def __init__(self, tails: "Tails", filters: Filters, caller: str, place: int) -> None:
        self.caller = caller
        self.idle_since = time.monotonic()
        self.is_waiting = False
        self._tails = tails
        self._filters = filters
        self._place = place  # The number of the next record to examine.
        self._changed = asyncio.Event()
        self._error: HeadraceError | None = None

    async def next(self) -> Shown:
        """Returns the next record; raises the error that ends the tail."""
        looked_at = 0
        while self._error is None:
            shown = self._tails.at(self._place)
            if shown is None:
                self._changed.clear()
                self.is_waiting = True
                try:
                    await self._changed.wait()
                finally:
                    self.is_waiting = False
                continue
            self._place += 1
            if self._filters.passes(shown.record, shown.columns):
                self.idle_since = time.monotonic()
                return shown
            looked_at += 1
            if looked_at % _TURN == 0:
                await asyncio.sleep(0)
        raise self._error

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: HeadraceError) -> None:
        self._error = error
        self._changed.set()


class Tails:
    """All open tails, and the newest records."""

    def __init__(self, max_tails: int = MAX_TAILS, max_of_one: int = MAX_TAILS_OF_ONE) -> None:
        self._max_tails = max_tails
        self._max_of_one = max_of_one
        self._open: set[OpenTail] = set()
        self._kept: deque[Shown] = deque()
        self._kept_bytes = 0
        self._first = 0  # The number of the oldest kept record.
        self._ended = False

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(self, filters: Filters, caller: str = "") -> Iterator[OpenTail]:
        """Opens a tail of the records that are committed from now on."""
        if self._ended:
            raise _stopping()
        self._make_room(caller)
        tail = OpenTail(self, filters, caller, self._first + len(self._kept))
        self._open.add(tail)
        try:
            yield tail
        finally:
            self._open.discard(tail)
            if not self._open:
                self._drop(0, 0)

    def at(self, number: int) -> Shown | None:
        """The record with this number; None if it is still to come; raises OverloadedError if it is no longer kept."""
        if number < self._first:
            late = "the reader is too slow and has missed records; query for them and open a new tail"
            raise OverloadedError(late, retry_after_ms=COME_BACK_MS)
        index = number - self._first
        return self._kept[index] if index < len(self._kept) else None

    def show(self, records: Sequence[PayloadRecord]) -> None:
        """Shows new records, in the order of their commit."""
        if not self._open:
            return
        for record in records:
            self._kept.append(shown := Shown(record))
            self._kept_bytes += shown.size
        # The latest batch is always kept: no tail has seen it yet.
        self._drop(max(MAX_KEPT, len(records)), _MAX_KEPT_BYTES, keep=len(records))
        for tail in self._open:
            tail.wake()

    def end(self) -> None:
        """Ends every tail, and refuses new ones."""
        self._ended = True
        for tail in self._open:
            tail.fail(_stopping())

    def _drop(self, count: int, size: int, keep: int = 0) -> None:
        while self._kept and (len(self._kept) > count or (self._kept_bytes > size and len(self._kept) > keep)):
            self._kept_bytes -= self._kept.popleft().size
            self._first += 1

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
            message = f"too many tails are open, {of[caller]} of them of this caller; retry later"
            raise OverloadedError(message, retry_after_ms=COME_BACK_MS)
        self._open.discard(tail)
        tail.fail(
            OverloadedError("too many tails are open: a newer one replaced this one", retry_after_ms=COME_BACK_MS)
        )


class SharedTails(Tails):
    """Tails of a database that other loggers write to too: they show what it has, not what this logger commits.

    `follow` reads the new records of all loggers while a tail is open; its own logger's commits wake it, those of
    others it finds within half a second. A new tail may begin with the records of the half second before.
    """

    def show(self, records: Sequence[PayloadRecord]) -> None:
        """Nothing: `follow` will find them."""

    async def follow(self, store: Store) -> None:
        """Shows the new records, until cancelled; waits while the store does not answer."""
        news = asyncio.Event()
        store.on_append(news.set)
        position: int | None = None
        while True:
            news.clear()
            with suppress(NotReadyError):
                position = await self._show_after(store, position)
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _POLL_S)
            if not len(self):
                await asyncio.sleep(_POLL_S)  # Nobody waits for a commit's records.

    async def _show_after(self, store: Store, position: int | None) -> int:
        """Shows all records after a position; returns that of the last one."""
        if position is None or not len(self):
            newest = await store.newest_position()
            # A tail that was opened meanwhile begins at the position before.
            return newest if position is None or not len(self) else position
        while page := await store.after(position, _PAGE, with_calls=True):
            super().show([stored.record for stored in page])
            position = page[-1].position
        return position


def _stopping() -> NotReadyError:
    return NotReadyError("the logger is stopping")
