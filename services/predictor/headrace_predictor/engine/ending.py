"""The end of a sequence: its blocks are freed, it is counted, its reader is notified. Used by the engine's thread."""

from __future__ import annotations

import threading
import time

from headrace.errors import HeadraceError, RequestFailedError
from headrace_predictor.counts import Outcome
from headrace_predictor.engine.interface import EngineStatistics
from headrace_predictor.engine.isolation import Isolation
from headrace_predictor.engine.load.queue_estimate import QueueEstimate
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.step import StepComputer


class Ending:
    """Ends the sequences of one engine; `guard` guards its scheduler."""

    def __init__(
        self,
        runner: ModelRunner | StepComputer,
        scheduler: Scheduler,
        guard: threading.Condition,
        statistics: EngineStatistics,
        estimate: QueueEstimate,
        isolation: Isolation,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._guard = guard
        self._statistics = statistics
        self._estimate = estimate
        self._isolation = isolation

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence whose caller has left."""
        self.end(sequence, "cancelled", RequestFailedError("the request was cancelled"))

    def end(self, sequence: Sequence, outcome: Outcome, error: HeadraceError, forget: bool = False) -> None:
        """Ends a sequence with an error. With `forget` none of its blocks is reusable."""
        void = self.release(sequence, outcome, forget)
        # The slot first: on a failed device, clearing may fail.
        sequence.slot.fail(error)
        if forget or not sequence.proven:
            self._runner.clear(void)

    def end_constrained(self, sequence: Sequence, error: HeadraceError | None) -> None:
        """Ends a sequence whose grammar has no next token, because it is complete or failed."""
        if error is not None:
            self.end(sequence, "failed", error)
            return
        self.release(sequence, "succeeded")
        sequence.slot.finish("stop", sequence.usage)

    def release(self, sequence: Sequence, outcome: Outcome, forget: bool = False) -> list[int]:
        """Frees a sequence's blocks and counts it, before its reader is notified; returns the void blocks."""
        with self._guard:
            released = self._scheduler.remove(sequence, forget)
            now = sequence.timeline.ended = time.monotonic()
            submitted_at, started_at = sequence.timeline.submitted, sequence.timeline.started or now
            if sequence.timeline.started is not None:
                self._estimate.ended(now)
            if outcome == "succeeded" and not sequence.was_held:
                self._estimate.succeeded(sequence.requested_tokens, now - started_at)
        self._isolation.release(sequence)
        self._statistics.add(outcome, submitted_at, started_at, now)
        return released
