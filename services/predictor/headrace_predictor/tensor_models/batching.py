"""Dynamic batching: which waiting requests run together, and when; and the thread that runs the batches.

`BatchQueue` is pure: no thread, no model, and the time comes from the caller, in seconds of time.monotonic(). All rows
of a request have the same length. Requests of similar length share a bucket (lengths up to 16, 32, 64, …), so padding
at most doubles a row. A bucket is due when its rows fill a batch, or when its oldest request has waited for
`max_delay_s`; among due buckets the one with the oldest request comes first. A batch takes a bucket's requests in order
of arrival, as many as fit `max_rows`.

`BatchWorker.submit` is called on an event loop and waits there for the result of one request. If a batch raises, each
of its requests runs again alone, so that only the culprit fails. An exception of the `fatal` types leaves the model
unusable and ends the thread: `died` raises, the running requests end with HopBrokenError, because one of them may have
caused it, and the waiting ones with NotReadyError. A batch that takes longer than `timeout_s` is fatal too; its thread
ends only with the process.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
)
from headrace.rpc.server.watchdog import Watchdog, dump_tracebacks
from headrace_predictor.engine.interface import EngineDeadError, Outcome, RequestCounts

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_SHORTEST_BUCKET = 16
_STOP_TIMEOUT_S = 2.0


@dataclass(eq=False)
class Waiting(Generic[T]):
    """A request in the queue; its caller needs the answer by `deadline`."""

    item: T
    rows: int
    length: int
    since: float
    deadline: float = math.inf


class BatchQueue(Generic[T]):
    """See the module. At most `max_waiting` requests wait."""

    def __init__(self, max_rows: int, max_delay_s: float, max_waiting: int) -> None:
        self.max_rows = max_rows
        self._max_delay_s = max_delay_s
        self._max_waiting = max_waiting
        self._buckets: dict[int, list[Waiting[T]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, entry: Waiting[T], retry_after_ms: int) -> None:
        """Queues a request; raises InvalidRequestError if it can never fit, OverloadedError if too many wait."""
        if entry.rows > self.max_rows:
            raise InvalidRequestError(f"a batch of {entry.rows}, at most {self.max_rows} are allowed")
        if len(self) >= self._max_waiting:
            raise OverloadedError(f"the queue is full: {self._max_waiting} wait", retry_after_ms=retry_after_ms)
        self._buckets.setdefault(bucket_of(entry.length), []).append(entry)

    def remove(self, entry: Waiting[T]) -> bool:
        """Removes a request; returns whether it was still queued."""
        bucket = bucket_of(entry.length)
        if entry not in self._buckets.get(bucket, ()):
            return False
        self._take(bucket, [entry])
        return True

    def take_all(self) -> list[Waiting[T]]:
        entries = [entry for bucket in self._buckets.values() for entry in bucket]
        self._buckets.clear()
        return entries

    def take_expired(self, now: float) -> list[Waiting[T]]:
        """Removes and returns the requests whose deadline has passed."""
        expired: list[Waiting[T]] = []
        for bucket, entries in list(self._buckets.items()):
            late = [entry for entry in entries if entry.deadline <= now]
            self._take(bucket, late)
            expired += late
        return expired

    def take_batch(self, now: float) -> list[Waiting[T]]:
        """Removes and returns the requests that run together now; none if no bucket is due."""
        due = [bucket for bucket in self._buckets if self._due_at(bucket) <= now]
        if not due:
            return []
        oldest = min(due, key=lambda bucket: self._buckets[bucket][0].since)
        batch: list[Waiting[T]] = []
        room = self.max_rows
        for entry in self._buckets[oldest]:
            if entry.rows > room:
                break
            batch.append(entry)
            room -= entry.rows
        self._take(oldest, batch)
        return batch

    def due_at(self) -> float | None:
        """When the next batch is due, unless more requests arrive; None if the queue is empty."""
        return min(map(self._due_at, self._buckets), default=None)

    def _due_at(self, bucket: int) -> float:
        entries = self._buckets[bucket]
        full = sum(entry.rows for entry in entries) >= self.max_rows
        return entries[0].since + (0.0 if full else self._max_delay_s)

    def _take(self, bucket: int, taken: list[Waiting[T]]) -> None:
        left = [entry for entry in self._buckets[bucket] if entry not in taken]
        if left:
            self._buckets[bucket] = left
        else:
            del self._buckets[bucket]


def bucket_of(length: int) -> int:
    """The longest row length of the bucket for rows of this length."""
    return max(_SHORTEST_BUCKET, 1 << (length - 1).bit_length())


@dataclass(frozen=True)
class _Job(Generic[T, R]):
    """A request and the future for its result."""

    item: T
    future: asyncio.Future[R]

    def report(self, set_outcome: Callable[[], None]) -> None:
        """Sets the outcome on the event loop, unless the caller has left."""
        loop = self.future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if self.future.done() else set_outcome())


class BatchWorker(Generic[T, R]):
    """See the module. `run` takes a batch's items and returns one result for each."""

    def __init__(
        self,
        name: str,
        run: Callable[[Sequence[T]], Sequence[R]],
        *,
        max_rows: int,
        max_delay_s: float,
        max_waiting: int,
        timeout_s: float = 60.0,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.counts = RequestCounts()
        self._name = name
        self._run_batch = run
        self._queue: BatchQueue[_Job[T, R]] = BatchQueue(max_rows, max_delay_s, max_waiting)
        self._running: set[Waiting[_Job[T, R]]] = set()
        self._fatal = fatal
        self._changed = threading.Condition()  # Guards the queue and the counters.
        self._stopping = False
        self._dead = threading.Event()
        self._timeout_s = timeout_s
        self._batch_under_way: int | None = None  # Its number.
        self._thread = threading.Thread(target=self._run, name=f"batches-{name}", daemon=True)
        self._watchdog = Watchdog(f"watchdog-{name}", timeout_s, lambda: self._batch_under_way, self._hang)
        self._thread.start()
        self._watchdog.start()

    async def submit(self, item: T, rows: int, length: int, deadline: Deadline) -> R:
        """Returns the item's result; cancelling removes the item from the queue."""
        now = time.monotonic()
        job: _Job[T, R] = _Job(item, asyncio.get_running_loop().create_future())
        entry = Waiting(job, rows, length, now, deadline.at)
        with self._changed:
            if self._stopping or self._dead.is_set():
                raise NotReadyError("the model is stopping")
            self._queue.add(entry, self.counts.retry_after_ms)
            self._changed.notify()
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._changed:
                if self._queue.remove(entry):
                    ended = time.monotonic()
                    self.counts.add("cancelled", now, ended, ended)
            raise

    async def died(self) -> None:
        """Waits until the thread ends without having been closed, then raises EngineDeadError."""
        while self._stopping or not self._dead.is_set():  # noqa: ASYNC110  # a thread's event cannot be awaited
            await asyncio.sleep(0.2)
        raise EngineDeadError(f"{self._thread.name} died")

    def close(self) -> None:
        """Ends the thread after the current batch; waiting requests end with NotReadyError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_TIMEOUT_S)
        self._watchdog.end()
        self._watchdog.join()

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._serve(batch)
        except BaseException:
            logger.critical("the batches of model %s ended", self._name, exc_info=True)
        finally:
            self._watchdog.end()
            self._end_all()

    def _hang(self) -> None:
        """Declares the model dead, on the watchdog's thread; the batch that takes too long cannot be stopped."""
        logger.critical("a batch of model %s takes longer than %g s", self._name, self._timeout_s)
        dump_tracebacks()
        self._end_all()

    def _end_all(self) -> None:
        self._dead.set()
        with self._changed:
            waiting = self._queue.take_all()
            running, self._running = self._running, set()
        now = time.monotonic()
        for entry in running:
            self._fail(entry, HopBrokenError("the engine died"), now)
        for entry in waiting:
            self._fail(entry, NotReadyError("the model is stopping"), now)

    def _next_batch(self) -> list[Waiting[_Job[T, R]]] | None:
        """Waits for a batch that is due; returns None when the worker stops."""
        while True:
            with self._changed:
                if self._stopping or self._dead.is_set():
                    return None
                now = time.monotonic()
                expired = self._queue.take_expired(now)
                batch = self._queue.take_batch(now)
                if not batch and not expired:
                    due_at = self._queue.due_at()
                    self._changed.wait(None if due_at is None else max(0.0, due_at - now))
            for entry in expired:
                self._fail(entry, DeadlineError("the deadline passed before the request ran"), now)
            if batch:
                return batch

    def _serve(self, batch: list[Waiting[_Job[T, R]]]) -> None:
        with self._changed:
            self._running.update(batch)
        try:
            self._run_together(batch)
        except self._fatal:
            raise
        except Exception as error:
            if len(batch) == 1:
                logger.error("model %s failed on a request", self._name, exc_info=error)
                self._fail(batch[0], RequestFailedError("the model failed on this request"), time.monotonic())
                return
            logger.warning("model %s: a batch of %d failed, each request runs alone: %s", self._name, len(batch), error)
            for entry in batch:
                self._serve([entry])

    def _run_together(self, batch: list[Waiting[_Job[T, R]]]) -> None:
        started_at = time.monotonic()
        with self._changed:
            self.counts.steps += 1
            self._batch_under_way = self.counts.steps
        try:
            results = self._run_batch([entry.item.item for entry in batch])
        finally:
            self._batch_under_way = None
        if self._dead.is_set():  # Too late: the requests have failed already.
            return
        for entry, result in zip(batch, results, strict=True):
            self._finish(entry, "succeeded", started_at)
            entry.item.report(partial(entry.item.future.set_result, result))

    def _fail(self, entry: Waiting[_Job[T, R]], error: HeadraceError, started_at: float) -> None:
        self._finish(entry, "failed", started_at)
        entry.item.report(partial(entry.item.future.set_exception, error))

    def _finish(self, entry: Waiting[_Job[T, R]], outcome: Outcome, started_at: float) -> None:
        left = entry.item.future.cancelled()
        with self._changed:
            self._running.discard(entry)
            self.counts.add("cancelled" if left else outcome, entry.since, started_at, time.monotonic())
