"""The sequences that have not ended: which of them wait, which run, and the blocks that these hold.

Pure. It decides only which sequence leaves a full queue; the scheduler, which is built on it, decides the rest.
"""

from bisect import insort
from collections.abc import Container
from dataclasses import dataclass
from itertools import count as counter

from headrace.errors import InvalidRequestError, OverloadedError
from headrace_predictor.engine.state.blocks import PREFIX_TOKENS, BlockManager
from headrace_predictor.engine.state.sequence import Row, Sequence, precedence
from headrace_predictor.engine.state.shares import Shares

_LEAST_STEP_TOKENS = 16
_STEPS_TO_REGAIN = 64


@dataclass(frozen=True)
class Scaling:
    """A scaling of positions that depends on how long a sequence is (LongRoPE, dynamic NTK).

    transformers picks the factors of a whole forward pass by its largest position. So in `generate` a token's key has
    those of the length at the time of its computation: the prompt's, or the token's own position + 1 for a later one.
    Phi's models compute their cache again where the factors change, so all their keys have those of the current length.

    `limits`: lengths beyond which the factors change, ascending; `grows`: from there on with each length.
    `recomputes`: keys of other factors than the current ones are computed again.
    """

    limits: tuple[int, ...]
    grows: bool
    recomputes: bool

    def stage(self, length: int) -> int:
        """The shortest length with the factors of `length`, 0 up to the first limit."""
        passed = [limit for limit in self.limits if length > limit]
        return length if passed and self.grows else passed[-1] + 1 if passed else 0

    def base(self, prompt: int, length: int) -> int:
        """The stage of the first keys of a sequence with so many ids, of which `prompt` are the request's input."""
        return self.stage(max(prompt, length) if self.recomputes else prompt)


class Holdings:
    """Gives blocks to sequences and takes them back. `reuses_prefixes`: see the scheduler.

    With recurrent states a sequence can start only where some are kept: at the end of blocks whose names are in
    `states`. They are kept at the last border of PREFIX_TOKENS in what a sequence begins with, and at the last one in
    what it shares with earlier ones; only blocks before these have names.
    """

    def __init__(self, blocks: BlockManager, reuses_prefixes: bool, states: Container[bytes] | None = None) -> None:
        self._blocks = blocks
        self._states = states
        self._reuses_prefixes = reuses_prefixes

    def find(self, sequence: Sequence) -> tuple[list[int], bool]:
        """The blocks with a sequence's first ids, and whether another sequence computes the next one."""
        if not self._reuses_prefixes:
            return [], False
        full = sequence.reusable // self._blocks.block_tokens
        names = sequence.block_names(full, self._blocks.block_tokens)
        found, pending = self._blocks.find(names)
        if self._states is not None:
            ends = len(sequence.ids) - 1, len(found) * self._blocks.block_tokens
            sequence.borders = frozenset(end // PREFIX_TOKENS * PREFIX_TOKENS for end in ends)
            while found and names[len(found) - 1] not in self._states:
                found.pop()
        return found, pending

    def missing(self, sequence: Sequence, cached: list[int]) -> int:
        """How many blocks are too few for the known ids of a sequence that would start, and the next one."""
        return self.needed(sequence, cached) - (self._blocks.free - self._blocks.idle(cached))

    def needed(self, sequence: Sequence, cached: list[int]) -> int:
        return self._blocks.blocks_for(len(sequence.ids) + 1) - len(cached)

    def start(self, sequence: Sequence, cached: list[int]) -> None:
        """Gives a sequence the cached blocks, and announces the names of those that it will compute."""
        self._blocks.share(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self._blocks.block_tokens
        if sequence.timeline.started is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.input_ids))
        if self._reuses_prefixes and self._states is None:
            full = len(sequence.ids) // self._blocks.block_tokens
            sequence.announced = sequence.block_names(full, self._blocks.block_tokens)[len(cached) :]
            self._blocks.announce(sequence.announced)

    def complete(self, row: Row) -> None:
        """Records that a row's ids have been computed: other sequences can reuse their blocks."""
        sequence = row.sequence
        before, sequence.computed = sequence.computed, row.start + row.count
        if self._reuses_prefixes:
            size = self._blocks.block_tokens
            first, end = before // size, sequence.computed // size
            if self._states is not None:
                first, end = 0, max((n for n in sequence.borders if before < n <= sequence.computed), default=0) // size
            if first < end:
                names = sequence.block_names(end, size)
                if self._states is not None and names[-1] not in self._states:
                    return
                for index in range(first, end):
                    self._blocks.name(sequence.blocks[index], names[index])

    def release(self, sequence: Sequence, forget: bool = False) -> list[int]:
        """Takes all blocks back; returns those that are void now. With `forget` none is reusable."""
        self._blocks.withdraw(sequence.announced)
        sequence.announced = []
        released = self._blocks.release(sequence.blocks, forget)
        sequence.blocks = []
        sequence.computed = 0
        sequence.state = None
        return released


class StepLimits:
    """`tokens` of a step and `running` sequences; shortages reduce them for some time."""

    def __init__(self, tokens: int, running: int) -> None:
        self.tokens = self._most_tokens = tokens
        self.running = self._most_running = running
        self._steps_since_shortage = 0

    def shorten(self, divisible: bool) -> bool:
        """Makes steps smaller after a shortage; whether that is possible. `divisible`: the step had prompts."""
        self._steps_since_shortage = 0
        if self.tokens <= _LEAST_STEP_TOKENS or not divisible:
            return False
        self.tokens = max(_LEAST_STEP_TOKENS, self.tokens // 2)
        return True

    def regain(self) -> None:
        """Undoes, gradually, what shortages reduced: called after a step that fit."""
        self._steps_since_shortage += 1
        if self._steps_since_shortage % _STEPS_TO_REGAIN == 0:
            self.tokens = min(self._most_tokens, 2 * self.tokens)
            self.running = min(self._most_running, self.running + 1)

    def restore(self) -> None:
        """Undoes all of it, when nothing runs."""
        self.tokens, self.running = self._most_tokens, self._most_running


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
        states: Container[bytes] | None = None,
    ) -> None:
        self.blocks = blocks
        # Both sorted by `precedence`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Removed from the queue for clients with fewer sequences; they end before the next step.
        self.crowded_out: list[Sequence] = []
        self.preempted = 0
        self._limits = StepLimits(max(step_tokens, max_running), max_running)
        self._holdings = Holdings(blocks, reuses_prefixes, states)
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
        return scaling.base(len(sequence.input_ids), len(sequence.ids))

    def _running_alone(self) -> Sequence | None:
        return next((sequence for sequence in self._alone if sequence.alone and sequence in self.running), None)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.waiting.remove(sequence)
        self._shares.start(sequence)
        insort(self.running, sequence, key=precedence)
        self._holdings.start(sequence, cached)

    def _crowd_out(self, newcomer: Sequence, retry_after_ms: int) -> None:
        """Makes a place in a full queue; refuses the newcomer if its client has the most there."""
        sequence = self._shares.crowded_out(newcomer, self.waiting)
        if sequence is None:
            raise self.queue_full(retry_after_ms)
        self.waiting.remove(sequence)
        self._shares.leave(sequence, running=False)
        self.crowded_out.append(sequence)

    def queue_full(self, retry_after_ms: int) -> OverloadedError:
        return OverloadedError(f"the queue is full: {self._max_waiting} wait", retry_after_ms=retry_after_ms)
