"""Finds a stream that gets no tokens although steps continue. Pure: times come from the caller.

Every step must serve the sequences that are due (`Scheduler.due`). If steps pass one by for `timeout_s`, the sequence
and with it the engine are stuck, which would otherwise raise no error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace_predictor.engine.state.sequence import Sequence


class ProgressWatch:
    """Monitors the sequences that steps pass by."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._passed_by_since: dict[Sequence, float] = {}

    def observe(self, due: Iterable[Sequence], served: Collection[Sequence], now: float) -> Sequence | None:
        """Records which due sequences a step served; returns the sequence that is stuck, if any."""
        before = self._passed_by_since
        passed_by = {sequence: before.get(sequence, now) for sequence in due if sequence not in served}
        self._passed_by_since = passed_by
        return next((sequence for sequence, since in passed_by.items() if now - since > self._timeout_s), None)
