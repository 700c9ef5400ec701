"""Publishes the tokens of a step to the readers of their sequences. Used only by the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Iterable

from headrace_predictor.engine.ending import Ending
from headrace_predictor.engine.interface import EngineStatistics, Logprobs, Usage
from headrace_predictor.engine.isolation import Isolation
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import Reader, wake
from headrace_predictor.engine.step import Result


class Publisher:
    """See the module. `vocabulary` is the number of the model's logits; without `forces` no token is forced."""

    def __init__(
        self,
        scheduler: Scheduler,
        ending: Ending,
        isolation: Isolation,
        statistics: EngineStatistics,
        vocabulary: int,
        forces: bool,
    ) -> None:
        self._scheduler = scheduler
        self._ending = ending
        self._isolation = isolation
        self._statistics = statistics
        self._vocabulary = vocabulary
        self._forces = forces

    def publish(self, results: Iterable[Result]) -> None:
        """Records what a step computed, and wakes the readers of its tokens."""
        readers: list[Reader] = []
        try:
            for row, token_id, logprobs, scores in results:
                if scores is not None:
                    row.sequence.add_scores(scores)
                self._scheduler.complete(row)
                if row.samples:
                    reader = self._take(row.sequence, token_id, logprobs)
                    if reader is not None:
                        readers.append(reader)
        finally:
            # They must wake even if a later row kills the engine.
            wake(readers)

    def _take(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> Reader | None:
        """Appends the next token to a sequence, and those that its grammar forces; returns the reader to be woken."""
        if sequence.alone:
            self._isolation.release(sequence)
        if sequence.constraint is not None and sequence.constraint.has_ended:
            self._ending.end_constrained(sequence, sequence.constraint.error)
            return None
        if sequence.timeline.first_token is None:
            sequence.timeline.first_token = time.monotonic()
        prompt = sequence.take_prompt()
        finish = self._count(sequence, sequence.append(token_id))
        reader = sequence.slot.publish(token_id, logprobs, finish, prompt)
        while self._forces and finish is None and (forced := sequence.forced(self._vocabulary)) is not None:
            finish = self._count(sequence, sequence.append_forced(forced))
            reader = sequence.slot.publish(forced, None, finish) or reader
        return reader

    def _count(self, sequence: Sequence, reason: str | None) -> tuple[str, Usage] | None:
        """Counts a token; ends the sequence if there is a reason."""
        self._statistics.tokens += 1
        self._statistics.tokens_after_cancel += sequence.slot.cancelled
        if reason is None:
            return None
        self._ending.release(sequence, "succeeded")
        return reason, sequence.usage
