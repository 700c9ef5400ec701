"""Estimates how long a request would wait for a slot and run, from the requests that have ended.

Pure; times come from the caller. Similar requests end in bursts, so the rate is measured over the last two rounds of
all slots and not over the last few ends. It is the rate of the current busy period: earlier ones do not predict it.
Until enough requests have ended, nothing is estimated. A machine that has become slower shows in the duration of its
steps before any request ends: runs are expected to last longer by as much.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headrace.errors import OverloadedError
from headrace_predictor.engine.state.sequence import Sequence

_ENOUGH = 8
_MARGIN = 1.2  # All work of a request that is late by a little is lost.
_STEPS_MEMORY_S = 1.0


class _Run(NamedTuple):
    requested_tokens: int
    seconds: float
    step_s: float


class QueueEstimate:
    """`places` is the number of requests that run at once."""

    def __init__(self, places: int) -> None:
        rounds = max(2 * _ENOUGH, 2 * places)
        self._ends: deque[float] = deque(maxlen=rounds)  # Times at which slots became free.
        self._runs: deque[_Run] = deque(maxlen=rounds)
        self._interval_s = 1.0  # The latest estimate of the time between ends.
        self._token_s = 0.0  # Seconds for each requested token; lower if requests end early.
        self._step_s = 0.0  # Of the latest second.
        self._run_step_s = 0.0  # The same as the runs ended.

    def stepped(self, seconds: float) -> None:
        """Records a step without prompts: those of a burst of prompts take longer on any machine."""
        self._step_s += min(1.0, seconds / _STEPS_MEMORY_S if self._step_s else 1.0) * (seconds - self._step_s)

    def ended(self, now: float) -> None:
        """Records that a slot has become free."""
        self._ends.append(now)
        if self._has_data:
            self._interval_s = self._interval(now)

    def succeeded(self, requested_tokens: int, seconds: float) -> None:
        """Records that a request for at most `requested_tokens` tokens ran for `seconds`."""
        self._runs.append(_Run(requested_tokens, seconds, self._step_s))
        self._token_s = sum(run.seconds for run in self._runs) / sum(run.requested_tokens for run in self._runs)
        self._run_step_s = sum(run.step_s for run in self._runs) / len(self._runs)

    def idle(self) -> None:
        """Records that there is no work."""
        self._ends.clear()
        self._runs.clear()
        self._token_s = self._step_s = self._run_step_s = 0.0

    @property
    def retry_after_ms(self) -> int:
        """The estimated time until the next slot is free."""
        return max(1, int(self._interval_s * 1000))

    def too_late(self) -> OverloadedError:
        """The error of a sequence that is expected to miss a deadline."""
        message = "the queue is longer than the request can wait"
        return OverloadedError(message, retry_after_ms=self.retry_after_ms)

    def is_late(self, sequence: Sequence, ahead: int, now: float) -> bool:
        """Whether a sequence behind `ahead` others is expected to miss a deadline."""
        if not ahead or not self._has_data:
            return False
        starts_at = now + _MARGIN * ahead * self._interval(now)
        first_token_deadline = sequence.first_token_deadline
        if first_token_deadline is not None and starts_at > first_token_deadline:
            return True
        return self.is_hopeless(sequence, starts_at)

    def is_hopeless(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that starts now is expected to miss its deadline."""
        slower = max(1.0, self._step_s / self._run_step_s) if self._run_step_s else 1.0
        done_at = now + _MARGIN * slower * self._token_s * sequence.requested_tokens
        return self._has_data and done_at > sequence.request.deadline

    @property
    def _has_data(self) -> bool:
        return len(self._ends) >= _ENOUGH

    def _interval(self, now: float) -> float:
        return (now - self._ends[0]) / len(self._ends)
