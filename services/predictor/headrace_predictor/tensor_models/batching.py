"""Dynamic batching: which waiting requests run together, and when.

Pure: no thread, no model, and the time comes from the caller, in seconds of time.monotonic().

All rows of a request have the same length. Requests of similar length share a bucket (lengths up to 16, 32, 64, …), so
padding at most doubles a row. A bucket is due when its rows fill a batch, or when its oldest request has waited for
`max_delay_s`; among due buckets the one with the oldest request comes first. A batch takes a bucket's requests in order
of arrival, as many as fit `max_rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")

_SHORTEST_BUCKET = 16


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
            raise OverloadedError("the queue is full", retry_after_ms=retry_after_ms)
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
