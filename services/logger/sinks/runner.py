"""Brings every record of the store to one sink, in the order of commit, and remembers how far it has come.

Records are read page by page and sent several at a time; a record's own events go one after the other. The cursor in
the store moves over an unbroken run of finished records only, so a restart resumes with the first unfinished one: no
record is passed over, some come again, with the same event ids. What the store's retention deletes before a sink has
taken it does not reach that sink.

An event that the sink cannot take now is tried again, for ever, at growing intervals with jitter; one that it refuses
is logged and passed over. So is one with which the sink fails in a way that it does not know, after some tries, and a
record of which it makes no events. Meanwhile at most `concurrency` records, 32 MiB and one page are in memory: the
reading stops, and other sinks are not affected. Counted in `counts`: delivered, retried, refused, failed. Any other
error is logged, and sending resumes later at the cursor.

A sink that the store has never heard of starts at the present end, or at the beginning.

    runner = SinkRunner(sink, store, ...)
    await runner.start()          # before records come in: from here on none is missed
    task = create_task(runner.run())
    task.cancel(); await runner.close()

Everything belongs to one event loop, but for `lag_s`; records become events on a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import ParamSpec, TypeVar

from millrace.errors import NotReadyError
from millrace.payload.times import ended_at
from millrace_protos.millrace_pb2 import PayloadRecord
from services.logger.sinks.sink import Event, RefusedError, Sink, TryAgainError
from services.logger.store.store import Store

logger = logging.getLogger(__name__)

_PAGE = 64  # Records read at once.
_WINDOW = 256  # Records from the cursor to the newest one begun.
_MAX_BYTES = 32 * 1024 * 1024
_POLL_S = 5.0  # How often the store is read without a notice of a commit.
_SAVE_EVERY_S = 0.1  # A cursor for each record would cost the store a commit each.
_MIN_DELAY_S, _MAX_DELAY_S = 0.2, 10.0
_STORE_DELAY_S = 1.0
_MAX_FAILURES = 10  # Tries of an event with which the sink fails unexpectedly.
_RESTART_DELAY_S = 5.0
_OUTCOMES = ("delivered", "retried", "refused", "failed")
_WARN_EVERY_S = 60.0

_Begun = tuple[int, asyncio.Task[None]]  # A record's position, and what sends it.
Arguments = ParamSpec("Arguments")
T = TypeVar("T")


class SinkRunner:
    """Sends the store's records to `sink`, at most `concurrency` at a time."""

    def __init__(self, sink: Sink, store: Store, *, concurrency: int, from_beginning: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._sink = sink
        self._store = store
        self._concurrency = concurrency
        self._from_beginning = from_beginning
        self._news = asyncio.Event()
        self._room = asyncio.Condition()
        self._records = 0  # That are being sent, and their size.
        self._bytes = 0
        self._finished = 0  # The position up to which every record is.
        self._ends: deque[float] = deque()  # When those ended that were read and are not, in their order.
        self._newest_end = math.inf  # When the newest read one ended; never, once no more wait behind it.
        self._saved = 0
        self._progress = asyncio.Event()
        self._next_warning = 0.0
        self._said_away = False

    @property
    def lag_s(self) -> float:
        """How long ago the oldest record ended, in the order of commit, that the sink has not got; 0: it has them all.

        Between two pages of the store, where that one is not known yet, the newest before it counts. For any thread.
        """
        try:
            end = self._ends[0]
        except IndexError:
            end = self._newest_end
        return max(0.0, time.time() - end)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """A copy of `counts`, with every outcome; for any thread."""
        return {outcome: self.counts[outcome] for outcome in _OUTCOMES}

    async def start(self) -> None:
        """Finds where to go on, and makes a sink that is new known to the store."""
        cursors = await self._store.cursors()
        if self._sink.name in cursors:
            position = cursors[self._sink.name]
        else:
            position = 0 if self._from_beginning else await self._store.last_position()
            await self._store.move_cursor(self._sink.name, position)
        self._finished = self._saved = position
        self._store.on_append(self._news.set)

    async def run(self) -> None:
        """Sends until it is cancelled; to be called once."""
        while True:
            try:
                await self._run()
            except ExceptionGroup:
                logger.exception("sending to the sink %s failed; it begins again", self._sink.name)
            await asyncio.sleep(_RESTART_DELAY_S)
            # What was on its way comes again.
            self._records = self._bytes = 0
            self._ends.clear()

    async def _run(self) -> None:
        window: asyncio.Queue[_Begun] = asyncio.Queue(_WINDOW)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(group, window), name="sink reader")
            group.create_task(self._follow(window), name="sink follower")
            group.create_task(self._save(), name="sink cursor")

    async def close(self) -> None:
        """Remembers how far it has come and ends the connections; `run` must have ended."""
        with suppress(NotReadyError):
            if self._finished > self._saved:
                await self._store.move_cursor(self._sink.name, self._finished)
        await self._sink.close()

    async def _read(self, group: asyncio.TaskGroup, window: asyncio.Queue[_Begun]) -> None:
        position = self._finished
        while True:
            self._news.clear()
            page = await _patiently(self._store.after, position, _PAGE)
            self._ends += (ends := [ended_at(stored.record) for stored in page])
            self._newest_end = ends[-1] if ends else math.inf
            for position, record in page:
                size = record.ByteSize()
                await self._take_room(size)
                task = group.create_task(self._deliver(record, size), name="sink record")
                await window.put((position, task))
            if not page:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _POLL_S)

    async def _take_room(self, size: int) -> None:
        """Waits until one more record of that size may be sent; a single one always may."""
        async with self._room:
            await self._room.wait_for(
                lambda: self._records == 0 or (self._records < self._concurrency and self._bytes + size <= _MAX_BYTES)
            )
            self._records += 1
            self._bytes += size

    async def _deliver(self, record: PayloadRecord, size: int) -> None:
        try:
            events = await asyncio.to_thread(self._sink.events, record)
        except Exception:
            self.counts["failed"] += 1
            logger.exception("the sink %s makes no events of the record %s", self._sink.name, record.record_id)
            events = ()
        for event in events:
            await self._send(event)
        async with self._room:
            self._records -= 1
            self._bytes -= size
            self._room.notify_all()

    async def _follow(self, window: asyncio.Queue[_Begun]) -> None:
        """Moves `_finished` over the records that are, in their order."""
        while True:
            position, task = await window.get()
            await task
            self._finished = position
            self._ends.popleft()
            self._progress.set()

    async def _save(self) -> None:
        while True:
            await self._progress.wait()
            self._progress.clear()
            position = self._finished
            await _patiently(self._store.move_cursor, self._sink.name, position)
            self._saved = position
            await asyncio.sleep(_SAVE_EVERY_S)

    async def _send(self, event: Event) -> None:
        delay_s, failures = _MIN_DELAY_S, 0
        while True:
            try:
                await self._sink.send(event)
            except RefusedError as error:
                self.counts["refused"] += 1
                logger.warning("the sink %s refused the event %s: %s", self._sink.name, event.id, error)
                return
            except TryAgainError as error:
                self.counts["retried"] += 1
                self._say_away(error)
                # Spread, so that not all that wait come back in the same instant.
                await asyncio.sleep(max(error.retry_after_s, delay_s * random.uniform(0.5, 1.0)))  # noqa: S311
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            except Exception as error:
                failures += 1
                if failures == _MAX_FAILURES:
                    self.counts["failed"] += 1
                    logger.exception(
                        "the sink %s fails with the event %s, which is given up", self._sink.name, event.id
                    )
                    return
                self.counts["retried"] += 1
                self._say_away(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            else:
                self.counts["delivered"] += 1
                self._say_back()
                return

    def _say_away(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARN_EVERY_S
            self._said_away = True
            logger.warning("the sink %s takes no events: %s", self._sink.name, error or type(error).__name__)

    def _say_back(self) -> None:
        if self._said_away:
            self._said_away = False
            logger.info("the sink %s takes events again", self._sink.name)


async def _patiently(ask: Callable[Arguments, Awaitable[T]], *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
    """What the store answers, as soon as it does; it says in the log why it does not."""
    while True:
        try:
            return await ask(*args, **kwargs)
        except NotReadyError:
            await asyncio.sleep(_STORE_DELAY_S)
