"""Publishes the tokens of a step to the readers of their sequences, and ends sequences. For the engine's thread."""

import threading
import time
from collections.abc import Iterable

from headrace.errors import HeadraceError, RequestFailedError
from headrace_predictor.engine.faults import Isolation
from headrace_predictor.engine.interface import EngineStatistics, Logprobs, Outcome, Usage
from headrace_predictor.engine.load import QueueEstimate
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.step import Result


class Publisher:
    """Publishes and ends the sequences of one engine; `guard` guards its scheduler.

    `vocabulary` is the number of the model's logits.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        guard: threading.Condition,
        statistics: EngineStatistics,
        estimate: QueueEstimate,
        isolation: Isolation,
        vocabulary: int,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._guard = guard
        self._statistics = statistics
        self._estimate = estimate
        self._isolation = isolation
        self._vocabulary = vocabulary

    def publish(self, results: Iterable[Result]) -> None:
        """Records what a step computed, and publishes its tokens."""
        for row, token_id, logprobs, scores in results:
            if scores is not None:
                row.sequence.add_scores(scores)
            self._scheduler.complete(row)
            if row.samples:
                self._take(row.sequence, token_id, logprobs)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence whose caller has left."""
        self.end(sequence, "cancelled", RequestFailedError("the request was cancelled"))

    def end(self, sequence: Sequence, outcome: Outcome, error: HeadraceError, forget: bool = False) -> None:
        """Ends a sequence with an error. With `forget` none of its blocks is reusable."""
        void = self._release(sequence, outcome, forget)
        # The slot first: on a failed device, clearing may fail.
        sequence.slot.fail(error)
        if forget or not sequence.proven:
            self._runner.clear(void)

    def _end_constrained(self, sequence: Sequence, error: HeadraceError | None) -> None:
        """Ends a sequence whose grammar has no next token, because it is complete or failed."""
        if error is not None:
            self.end(sequence, "failed", error)
            return
        self._release(sequence, "succeeded")
        sequence.slot.finish("stop", sequence.usage)

    def _release(self, sequence: Sequence, outcome: Outcome, forget: bool = False) -> list[int]:
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

    def _take(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> None:
        """Appends the next token to a sequence, and those that its grammar forces."""
        if sequence.alone:
            self._isolation.release(sequence)
        if sequence.constraint is not None and sequence.constraint.has_ended:
            self._end_constrained(sequence, sequence.constraint.error)
            return
        if sequence.timeline.first_token is None:
            sequence.timeline.first_token = time.monotonic()
        prompt = sequence.take_prompt()
        finish = self._count(sequence, sequence.append(token_id))
        sequence.slot.publish(token_id, logprobs, finish, prompt)
        while finish is None and (forced := sequence.forced(self._vocabulary)) is not None:
            finish = self._count(sequence, sequence.append_forced(forced))
            sequence.slot.publish(forced, None, finish)

    def _count(self, sequence: Sequence, reason: str | None) -> tuple[str, Usage] | None:
        """Counts a token; ends the sequence if there is a reason."""
        self._statistics.tokens += 1
        self._statistics.tokens_after_cancel += sequence.slot.cancelled
        if reason is None:
            return None
        self._release(sequence, "succeeded")
        return reason, sequence.usage
