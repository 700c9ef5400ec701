"""Which sequences run: first come, first served, within the cache's tokens and the batch's rows.

Pure: no thread, no clock but the caller's, no model. What it admits it has reserved the worst case
for, so a running sequence never lacks room.
"""

from __future__ import annotations

from collections import deque

from millrace.errors import InvalidRequestError, OverloadedError
from services.predictor.engine.sequence import Sequence


class Scheduler:
    """Owns the queue of waiting sequences and the list of running ones."""

    def __init__(self, max_running: int, max_waiting: int, cache_tokens: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_tokens = cache_tokens
        self._cache_tokens = cache_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended, the running ones first."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence, retry_after_ms: int) -> None:
        """Queues a sequence; refuses what can never fit and what finds the queue full."""
        if sequence.reserved_tokens > self._cache_tokens:
            raise InvalidRequestError(
                f"prompt and max_tokens need {sequence.reserved_tokens} tokens, the cache holds {self._cache_tokens}"
            )
        if len(self.waiting) >= self._max_waiting and not self._has_room(sequence):
            raise OverloadedError("the queue is full", retry_after_ms=retry_after_ms)
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to the running ones while there is room; the new ones."""
        admitted = []
        while self.waiting and self._has_room(self.waiting[0], queued=0):
            sequence = self.waiting.popleft()
            self.free_tokens -= sequence.reserved_tokens
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that has ended, and gives back what it had reserved."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.free_tokens += sequence.reserved_tokens
        else:
            self.waiting.remove(sequence)

    def _has_room(self, sequence: Sequence, queued: int | None = None) -> bool:
        ahead = len(self.waiting) if queued is None else queued
        return len(self.running) + ahead < self._max_running and sequence.reserved_tokens <= self.free_tokens
