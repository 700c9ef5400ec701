"""Delivers every record of the store to one sink, in the order of commit, and persists its position.

Records are read page by page, and several of a page are sent at a time; the events of one record are sent in sequence.
The cursor in the store moves only over an unbroken run of finished records, so a restart resumes with the first
unfinished one: no record is skipped, some are sent again, with the same event ids. Records that retention deletes
before a sink has accepted them do not reach that sink.

An event that the sink cannot accept now is retried without limit, with exponential backoff and jitter; one that it
refuses is logged and skipped. An event on which the sink fails in an unknown way is skipped after some attempts, as is
a record that it cannot convert to events. Meanwhile one page is in memory: reading pauses, and other sinks are not
affected. `counts` has the events delivered, retried, refused and failed. Any other error is logged, and sending resumes
later at the cursor.

A sink without a cursor in the store starts at the current end, or at the beginning.

    runner = SinkRunner(sink, store, ...)
    await runner.start()          # before records arrive: none is missed from here on
    task = create_task(runner.run())
    task.cancel(); await runner.close()

Where several loggers have the store, `run_alone` does all of it in one of them at a time.

Owned by the event loop, except `lag_s`; records are converted to events on a thread.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from headrace.errors import NotReadyError
from headrace.payload.records import ended_at
from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks.delivery import Event, RefusedError, TryAgainError
from headrace_logger.store.reading import Stored
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import PayloadRecord

logger = logging.getLogger(__name__)

_PAGE = 256  # Records in one read, which the store bounds by size too.
_POLL_S = 5.0  # The interval of reads without a notice of a commit.
_SAVE_EVERY_S = 0.1  # Saving the cursor after each record would cost the store a commit each time.
_MIN_DELAY_S, _MAX_DELAY_S = 0.2, 10.0
_STORE_DELAY_S = 1.0
_ALONE_S = 2.0
_MAX_FAILURES = 10  # Attempts of an event on which the sink fails unexpectedly.
_RESTART_DELAY_S = 5.0
_OUTCOMES = ("delivered", "retried", "refused", "failed")
_WARN_EVERY_S = 60.0

Arguments = ParamSpec("Arguments")
T = TypeVar("T")


class Sink(Protocol):
    """A receiver of records; `name` identifies its cursor."""

    name: str

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """The record's events in the order of sending, the same every time; called on any thread."""

    async def send(self, event: Event) -> None:
        """Returns when the sink has accepted the event; raises TryAgainError or RefusedError."""

    async def close(self) -> None: ...


class SinkRunner:
    """Sends the store's records to `sink`, at most `sink_concurrency` at a time."""

    def __init__(self, sink: Sink, store: Store, settings: LoggerSettings) -> None:
        self.counts: Counter[str] = Counter()
        self._sink = sink
        self._store = store
        self._turn = asyncio.Semaphore(settings.sink_concurrency)
        self._from_beginning = settings.sink_from == "beginning"
        self._news = asyncio.Event()
        self._finished = 0  # All records up to this position are finished.
        self._saved = 0
        self._progress = asyncio.Event()
        self._end = math.inf  # When the first record that is not finished ended; infinite: there is none.
        self._next_warning = 0.0
        self._is_unavailable = False
        store.on_append(self._news.set)

    @property
    def lag_s(self) -> float:
        """The time since the end of the first record, in the order of commit, that the sink has not accepted; 0: none.

        Between two pages of the store, when that record is unknown, the last one before it is used. Thread-safe.
        """
        return max(0.0, time.time() - self._end)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """A copy of `counts` with all outcomes; thread-safe."""
        return {outcome: self.counts[outcome] for outcome in _OUTCOMES}

    async def start(self) -> None:
        """Loads the cursor, or creates one for a new sink."""
        cursors = await self._store.cursors()
        if self._sink.name in cursors:
            position = cursors[self._sink.name]
        else:
            position = 0 if self._from_beginning else await self._store.last_position()
            await self._store.move_cursor(self._sink.name, position)
        self._finished = self._saved = position

    async def run(self) -> None:
        """Sends until it is cancelled; called once."""
        while True:
            try:
                await self._run()
            except ExceptionGroup:
                logger.exception("sending to the sink %s failed; it is restarted", self._sink.name)
            await asyncio.sleep(_RESTART_DELAY_S)

    async def run_alone(self) -> None:
        """Sends, until it is cancelled, while no other logger sends to this sink."""
        while True:
            async with self._store.database.alone(f"sink {self._sink.name}") as is_alone:
                with suppress(NotReadyError):
                    await self.start()
                    await self._run_while(is_alone)

    async def _run_while(self, is_alone: Callable[[], bool]) -> None:
        sending = asyncio.create_task(self.run(), name="sink of all loggers")
        try:
            while await asyncio.to_thread(is_alone):  # noqa: ASYNC110  # the server decides
                await asyncio.sleep(_ALONE_S)
            logger.warning("the sink %s is left to other loggers: the database was away", self._sink.name)
            # Another logger may be ahead.
            self._saved = self._finished
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._end = math.inf

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save(), name="sink cursor")
            while True:
                self._news.clear()
                if page := await _retrying(self._store.after, self._finished, _PAGE):
                    await self._deliver(page)
                    continue
                self._end = math.inf
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _POLL_S)

    async def _deliver(self, page: Sequence[Stored]) -> None:
        """Sends the records, and moves `_finished` over them in order."""
        async with asyncio.TaskGroup() as group:
            sending = [group.create_task(self._deliver_one(record), name="sink record") for _, record in page]
            for (position, record), task in zip(page, sending, strict=True):
                self._end = ended_at(record)
                await task
                self._finished = position
                self._progress.set()

    async def _save(self) -> None:
        while True:
            await self._progress.wait()
            self._progress.clear()
            position = self._finished
            await _retrying(self._store.move_cursor, self._sink.name, position)
            self._saved = position
            await asyncio.sleep(_SAVE_EVERY_S)

    async def close(self) -> None:
        """Saves the cursor and closes the connections; `run` must have ended."""
        with suppress(NotReadyError):
            if self._finished > self._saved:
                await self._store.move_cursor(self._sink.name, self._finished)
        await self._sink.close()

    async def _deliver_one(self, record: PayloadRecord) -> None:
        async with self._turn:
            try:
                events = await asyncio.to_thread(self._sink.events, record)
            except Exception:
                self.counts["failed"] += 1
                name = self._sink.name
                logger.exception("the sink %s cannot convert the record %s to events", name, record.record_id)
                return
            for event in events:
                await self._send(event)

    async def _send(self, event: Event) -> None:
        delay_s, failures = _MIN_DELAY_S, 0
        while True:
            try:
                await self._sink.send(event)
            except RefusedError as error:
                self.counts["refused"] += 1
                logger.warning("the sink %s refused the event %s: %s", self._sink.name, event.id, error)
                return
            except Exception as error:
                # Jitter, so that events do not all return at the same instant.
                wait_s = delay_s * random.uniform(0.5, 1.0)  # noqa: S311
                if isinstance(error, TryAgainError):
                    wait_s = max(error.retry_after_s, wait_s)
                elif (failures := failures + 1) == _MAX_FAILURES:
                    self.counts["failed"] += 1
                    logger.exception("the sink %s fails with the event %s, which is skipped", self._sink.name, event.id)
                    return
                self.counts["retried"] += 1
                if (now := time.monotonic()) >= self._next_warning:
                    self._next_warning, self._is_unavailable = now + _WARN_EVERY_S, True
                    logger.warning("the sink %s accepts no events: %s", self._sink.name, error or type(error).__name__)
                await asyncio.sleep(wait_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            else:
                self.counts["delivered"] += 1
                if self._is_unavailable:
                    self._is_unavailable = False
                    logger.info("the sink %s accepts events again", self._sink.name)
                return


async def _retrying(call: Callable[Arguments, Awaitable[T]], *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
    """Calls the store until it answers; the store itself logs its failures."""
    while True:
        try:
            return await call(*args, **kwargs)
        except NotReadyError:
            await asyncio.sleep(_STORE_DELAY_S)
