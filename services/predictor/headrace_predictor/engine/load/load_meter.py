"""The load of an engine, for threads that observe it.

The engine's thread reports each step. `read` is thread-safe and blocks the engine and submitters only while it copies
the two lists of sequences.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Rows

from headrace_predictor.engine.interface import EngineLoad, EngineStatistics, EngineTotals
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Row


class LoadMeter:
    """See the module; `guard` is held by every thread that changes the scheduler."""

    def __init__(self, scheduler: Scheduler, statistics: EngineStatistics, guard: threading.Condition) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._guard = guard
        self._batch = 0

    def begin(self, rows: Rows[Row], now: float) -> None:
        """Records the rows of a step that begins, and which sequences start with it."""
        self._batch = len(rows)
        for row in rows:
            sequence = row.sequence
            if sequence.timeline.started is None:
                sequence.slot.start(now, sequence.cached_tokens)
                self._statistics.prompt_tokens += len(sequence.request.input_ids)
                self._statistics.cached_tokens += sequence.cached_tokens

    @staticmethod
    def end(rows: Rows[Row], seconds: float) -> None:
        """Divides the duration of a step among its sequences, by the tokens computed for each.

        The parts of all sequences add up to the time that the engine worked; waiting sequences have none of it.
        """
        token_s = seconds / sum(row.count for row in rows)
        for row in rows:
            row.sequence.timeline.engine_s += row.count * token_s

    def idle(self) -> None:
        """Records that there is no work."""
        self._batch = 0

    def read(self) -> EngineLoad:
        with self._guard:
            running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
            prompts = [sequence.remaining for sequence in running + waiting if not sequence.decodes]
        oldest = min((sequence.timeline.submitted for sequence in running + waiting), default=None)
        counted = self._statistics
        return EngineLoad(
            running=len(running),
            waiting=len(waiting),
            batch=self._batch,
            blocks_in_use=self._scheduler.blocks.in_use,
            oldest_age_s=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
            totals=EngineTotals(
                prompt_tokens=counted.prompt_tokens,
                cached_tokens=counted.cached_tokens,
                tokens=counted.tokens,
                tokens_after_cancel=counted.tokens_after_cancel,
                preempted=self._scheduler.preempted,
            ),
            waiting_tokens=sum(prompts),
        )
