"""Records shown to the calls of Tail as they are committed.

    with tails.open(filters) as tail:
        record = await tail.next()

`show` takes new records and never waits: each tail keeps what its reader has yet to read, within a bound. A reader
that falls behind further gets what it was late for no more, but OverloadedError; so does one tail too many. From
`end` on every tail raises NotReadyError: its reader may come again when the logger does.

All on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millrace.errors import MillraceError, NotReadyError, OverloadedError
from millrace.protos.millrace_pb2 import PayloadRecord
from services.logger.filters import Filters

MAX_TAILS = 64
MAX_WAITING = 1000
_MAX_WAITING_BYTES = 16 * 1024 * 1024
_COME_BACK_MS = 1000


class OpenTail:
    """What one reader has yet to read."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._waiting: deque[PayloadRecord] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._error: MillraceError | None = None

    async def next(self) -> PayloadRecord:
        """The record that comes next; raises why there will be none."""
        while not self._waiting and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        record = self._waiting.popleft()
        self._bytes -= record.ByteSize()
        return record

    def show(self, record: PayloadRecord) -> None:
        """Keeps a record that passes the filters; cuts the reader off if it is too much."""
        if self._error is not None or not self._filters.passes(record):
            return
        self._waiting.append(record)
        self._bytes += record.ByteSize()
        self._changed.set()
        if len(self._waiting) > MAX_WAITING or self._bytes > _MAX_WAITING_BYTES:
            late = f"the reader is too slow: {len(self._waiting)} records wait for it"
            self.fail(OverloadedError(late, retry_after_ms=_COME_BACK_MS))

    def fail(self, error: MillraceError) -> None:
        """Ends the tail; what waits is dropped."""
        self._error = error
        self._waiting.clear()
        self._changed.set()


class Tails:
    """Every open tail."""

    def __init__(self) -> None:
        self._open: set[OpenTail] = set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(self, filters: Filters) -> Iterator[OpenTail]:
        """A tail of what is committed from now on."""
        if self._ended:
            raise _stopping()
        if len(self._open) >= MAX_TAILS:
            raise OverloadedError(
                f"{MAX_TAILS} tails are open, which is all there may be", retry_after_ms=_COME_BACK_MS
            )
        tail = OpenTail(filters)
        self._open.add(tail)
        try:
            yield tail
        finally:
            self._open.discard(tail)

    def show(self, records: Sequence[PayloadRecord]) -> None:
        """Shows new records, in the order of their commit."""
        for tail in self._open:
            for record in records:
                tail.show(record)

    def end(self) -> None:
        """Ends every tail, and those that would be opened."""
        self._ended = True
        for tail in self._open:
            tail.fail(_stopping())


def _stopping() -> NotReadyError:
    return NotReadyError("the logger is stopping")
