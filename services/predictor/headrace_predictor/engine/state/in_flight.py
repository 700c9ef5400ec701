"""The sequences that have not ended: which of them wait, which run, and the blocks that these hold.

Pure. It decides only which sequence leaves a full queue; the scheduler, which is built on it, decides the rest.
"""

from __future__ import annotations

from bisect import insort
from itertools import count as counter

from headrace.errors import InvalidRequestError, OverloadedError
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.holdings import Holdings
from headrace_predictor.engine.state.scaling import Scaling
from headrace_predictor.engine.state.sequence import Row, Sequence, precedence
from headrace_predictor.engine.state.shares import Shares
from headrace_predictor.engine.state.step_limits import StepLimits


class InFlight:
    """The queue of waiting sequences, the list of running ones, and the accounts of their clients.

    `step_tokens` is the maximum that a step computes, except that an encoder's prompt, which cannot be divided, may
    exceed it. `reuses_prefixes`: the contents of a block depend only on the ids up to its end, and the stage.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_running: int,
        max_waiting: int,
        step_tokens: int,
        reuses_prefixes: bool = True,
        scaling: Scaling | None = None,
    ) -> None:
        self.blocks = blocks
        # Both sorted by `precedence`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Removed from the queue for clients with fewer sequences; they end before the next step.
        self.crowded_out: list[Sequence] = []
        self.preempted = 0
        self._limits = StepLimits(max(step_tokens, max_running), max_running)
        self._holdings = Holdings(blocks, reuses_prefixes)
        self._shares = Shares()
        self._scaling = scaling
        self._alone: list[Sequence] = []  # Isolated sequences without their next token, in order of arrival.
        self._max_waiting = max_waiting
        self._arrivals = counter()

    @property
    def step_tokens(self) -> int:
        return self._limits.tokens

    @property
    def max_running(self) -> int:
        return self._limits.running

    @property
    def streams(self) -> int:
        """The number of running sequences that decode."""
        return sum([len(sequence.ids) - sequence.computed <= sequence.newest for sequence in self.running])

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended, the running ones first."""
        return [*self.running, *self.waiting, *self.crowded_out]

    def add(self, sequence: Sequence, retry_after_ms: int) -> None:
        """Queues a sequence; refuses it if it can never fit or if the queue is full."""
        if not sequence.ids:
            raise InvalidRequestError("the prompt is empty")
        if self.blocks.blocks_for(sequence.longest) > self.blocks.total:
            held = self.blocks.total * self.blocks.block_tokens
            raise InvalidRequestError(f"prompt and max_tokens need {sequence.longest} tokens, the cache holds {held}")
        ahead = len(self.waiting) + len(self.running)
        if len(self.waiting) >= self._max_waiting and ahead >= self.max_running:
            self._crowd_out(sequence, retry_after_ms)
        sequence.number = next(self._arrivals)
        self._enter(sequence)
        self._shares.arrive(sequence)
        insort(self.waiting, sequence, key=precedence)
        if sequence.alone:
            self._alone.append(sequence)

    def complete(self, row: Row) -> None:
        """Records that a row's ids have been computed: other sequences can reuse their blocks."""
        self._holdings.complete(row)

    def remove(self, sequence: Sequence, forget: bool = False) -> list[int]:
        """Removes a sequence that has ended; returns the blocks that are void now. With `forget` none is reusable."""
        if sequence in self.crowded_out:
            self.crowded_out.remove(sequence)
        else:
            ran = sequence in self.running
            (self.running if ran else self.waiting).remove(sequence)
            self._shares.leave(sequence, ran)
        if sequence in self._alone:
            self._alone.remove(sequence)
        return self._holdings.release(sequence, forget)

    def preempt(self, sequence: Sequence) -> None:
        """Frees the blocks of a running sequence and returns it to its place in the queue."""
        self.running.remove(sequence)
        self._holdings.release(sequence)
        self._enter(sequence)
        self._shares.preempt(sequence)
        insort(self.waiting, sequence, key=precedence)
        sequence.preempt()
        self.preempted += 1

    def rescale(self) -> None:
        """Begins again with what has grown into another stage, in its slot: all its keys have to be computed."""
        scaling = self._scaling
        if scaling is not None and scaling.recomputes:
            for sequence in self.running:
                if self._stage(sequence, scaling) != sequence.stage:
                    self._holdings.release(sequence)
                    self._enter(sequence)

    def regain(self) -> None:
        """Called after a step that fit: undoes, gradually, what `make_room` reduced."""
        self._limits.regain()

    def restore(self) -> None:
        """Undoes all of it, when nothing runs."""
        self._limits.restore()

    def _enter(self, sequence: Sequence) -> None:
        if self._scaling is not None:
            sequence.enter(self._stage(sequence, self._scaling))

    @staticmethod
    def _stage(sequence: Sequence, scaling: Scaling) -> int:
        return scaling.base(len(sequence.request.input_ids), len(sequence.ids))

    def _running_alone(self) -> Sequence | None:
        return next((sequence for sequence in self._alone if sequence.alone and sequence in self.running), None)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.waiting.remove(sequence)
        self._shares.start(sequence)
        insort(self.running, sequence, key=precedence)
        self._holdings.start(sequence, cached)

    def _crowd_out(self, newcomer: Sequence, retry_after_ms: int) -> None:
        """Makes a place in a full queue; refuses the newcomer if its client has the most there."""
        sequence = self._shares.crowded_out(newcomer.request, self.waiting)
        if sequence is None:
            raise queue_full(retry_after_ms)
        self.waiting.remove(sequence)
        self._shares.leave(sequence, running=False)
        self.crowded_out.append(sequence)


def queue_full(retry_after_ms: int) -> OverloadedError:
    return OverloadedError("the queue is full", retry_after_ms=retry_after_ms)
