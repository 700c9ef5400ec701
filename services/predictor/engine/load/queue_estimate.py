"""How long a request would wait for a place and take then, by those that have ended.

Pure; seconds come from the caller. Requests end in bursts where they are alike, so their rate is that of
the last two rounds of all places and not of the last few ends. It is that of the current busy time: what
was before a pause says nothing of what comes after it, and until enough have ended nothing is known.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from services.predictor.engine.state.sequence import Sequence

_ENOUGH = 8
_MARGIN = 1.2  # What is late by little has had all of its work done for nothing.


class _Run(NamedTuple):
    asked_tokens: int
    seconds: float


class QueueEstimate:
    """`places` is how many requests run at once."""

    def __init__(self, places: int) -> None:
        rounds = max(2 * _ENOUGH, 2 * places)
        self._ends: deque[float] = deque(maxlen=rounds)  # When places came free.
        self._runs: deque[_Run] = deque(maxlen=rounds)
        self._interval_s = 1.0  # Between ends, as last known.
        self._token_s = 0.0  # For each token asked for; who ends early makes it less.

    def ended(self, now: float) -> None:
        """Notes that a place has come free."""
        self._ends.append(now)
        if self._knows:
            self._interval_s = self._interval(now)

    def succeeded(self, asked_tokens: int, seconds: float) -> None:
        """Notes that a request for so many tokens at most ran for so long."""
        self._runs.append(_Run(asked_tokens, seconds))
        self._token_s = sum(run.seconds for run in self._runs) / sum(run.asked_tokens for run in self._runs)

    def idle(self) -> None:
        """Notes that there is nothing to do."""
        self._ends.clear()
        self._runs.clear()
        self._token_s = 0.0

    @property
    def retry_after_ms(self) -> int:
        """About when the next place comes free."""
        return max(1, int(self._interval_s * 1000))

    def is_late(self, sequence: Sequence, ahead: int, now: float) -> bool:
        """Whether a sequence behind so many others would miss a deadline, as far as anybody knows."""
        if not ahead or not self._knows:
            return False
        starts_at = now + _MARGIN * ahead * self._interval(now)
        first_token_deadline = sequence.first_token_deadline
        if first_token_deadline is not None and starts_at > first_token_deadline:
            return True
        return self.is_hopeless(sequence, starts_at)

    def is_hopeless(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence would not be done by its deadline if it began now, as far as anybody knows."""
        done_at = now + _MARGIN * self._token_s * sequence.asked
        return self._knows and done_at > sequence.request.deadline

    @property
    def _knows(self) -> bool:
        return len(self._ends) >= _ENOUGH

    def _interval(self, now: float) -> float:
        return (now - self._ends[0]) / len(self._ends)
