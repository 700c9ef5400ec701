"""Finds a stream that gets nothing although steps go on. Pure: seconds come from the caller.

Every step must serve the sequences that are due (`Scheduler.due`). One that steps have passed by for
`timeout_s` is stuck, and so is the engine: no error will ever tell its reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.predictor.engine.state.sequence import Sequence


class ProgressWatch:
    """Told of each step."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._passed_by_since: dict[Sequence, float] = {}

    def observe(self, due: Iterable[Sequence], served: Collection[Sequence], now: float) -> Sequence | None:
        """Notes whom a step served of those who were due; the sequence that is stuck, if one is."""
        before = self._passed_by_since
        passed_by = {sequence: before.get(sequence, now) for sequence in due if sequence not in served}
        self._passed_by_since = passed_by
        return next((sequence for sequence, since in passed_by.items() if now - since > self._timeout_s), None)
