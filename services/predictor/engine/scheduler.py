"""Which ids of which sequences the next step computes.

Pure: no thread, no clock, no model. A step takes every sequence that waits for its next token, then
chunks of prompts as far as the step's budget of tokens goes, then new sequences. First come, first
served, and those that go on from elsewhere before those that begin. Where blocks run out, the last of the
running sequences gives its own back and is computed again later, so that the first always goes on and none
starves.

A sequence that runs alone waits for its turn like any other. From the step that begins its computation
until its next token is there, or it has ended, every step is its own: the others keep their blocks and
wait. Between two of these the others have a step.
"""

from __future__ import annotations

from bisect import insort
from itertools import count as counter

from millrace.errors import InvalidRequestError, OverloadedError
from services.predictor.engine.state.blocks import BlockManager
from services.predictor.engine.state.sequence import Row, Sequence

_LEAST_STEP_TOKENS = 16
_STEPS_TO_REGAIN = 64
# Positions of prompts that a step scores at most, of all its rows together: the logits of a whole vocabulary each take
# memory, and time for which the others of the step wait.
_MAX_SCORED = 64


class Scheduler:
    """Owns the queue of waiting sequences, the list of running ones (oldest first), and their blocks.

    `step_tokens` is what a step computes at most; an encoder's prompt, which cannot be divided, may be
    more. `reuses_prefixes` is for models whose blocks depend on nothing but the ids up to them.
    """

    def __init__(
        self, blocks: BlockManager, max_running: int, max_waiting: int, step_tokens: int, reuses_prefixes: bool = True
    ) -> None:
        self.blocks = blocks
        # Both by `precedence`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step_tokens = self._most_step_tokens = max(step_tokens, max_running)
        self.max_running = self._most_running = max_running
        self.preempted = 0
        self._steps_since_shortage = 0
        self._alone: list[Sequence] = []  # Those whose next token is not there yet, in the order of arrival.
        self._gave_way = False  # The others, in the latest step.
        self._full = False  # Without blocks for the next sequence, in the latest step.
        self._max_waiting = max_waiting
        self._reuses_prefixes = reuses_prefixes
        self._arrivals = counter()
        self._scores_left = 0  # Positions of prompts that this step can still score.

    @property
    def streams(self) -> int:
        """Running sequences of which nothing is missing but the next token."""
        return sum(sequence.remaining == 1 for sequence in self.running)

    @property
    def prompts(self) -> int:
        """Sequences that have more to compute, running ones and those for which there is a place."""
        places = self.max_running - len(self.running)
        return len(self.running) - self.streams + min(places, len(self.waiting))

    def queue_before(self, sequence: Sequence) -> int:
        """Sequences that wait for another's end and would go before a new one."""
        if not self._full and len(self.running) < self.max_running:
            return 0
        if not sequence.request.moved:
            return len(self.waiting)
        return sum(waiting.request.moved for waiting in self.waiting)

    @property
    def contended(self) -> bool:
        """Whether a place that one of those who wait does not take is another's."""
        places = 0 if self._full else self.max_running - len(self.running)
        return len(self.waiting) > max(1, places)

    @property
    def due(self) -> list[Sequence]:
        """Running sequences that no step may pass by: who runs alone, else those that decode and the oldest."""
        alone = self._running_alone()
        if alone is not None:
            return [alone]
        return [sequence for i, sequence in enumerate(self.running) if i == 0 or sequence.remaining == 1]

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended, the running ones first."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence, retry_after_ms: int) -> None:
        """Queues a sequence; refuses what can never fit and what finds the queue full."""
        if not sequence.ids:
            raise InvalidRequestError("the prompt is empty")
        if self.blocks.blocks_for(sequence.longest) > self.blocks.total:
            held = self.blocks.total * self.blocks.block_tokens
            raise InvalidRequestError(f"prompt and max_tokens need {sequence.longest} tokens, the cache holds {held}")
        ahead = len(self.waiting) + len(self.running)
        if len(self.waiting) >= self._max_waiting and ahead >= self.max_running:
            raise OverloadedError("the queue is full", retry_after_ms=retry_after_ms)
        sequence.number = next(self._arrivals)
        insort(self.waiting, sequence, key=precedence)
        if sequence.alone:
            self._alone.append(sequence)

    def schedule(self, prefill_tokens: int) -> list[Row]:
        """The rows of the next step: all sequences that decode, and `prefill_tokens` of prompts at most; or a
        sequence alone."""
        rows: dict[Sequence, Row] = {}
        self._scores_left = _MAX_SCORED
        alone = self._next_alone() if self._alone else None
        if alone is not None:
            self._plan(alone, min(alone.remaining, max(self.step_tokens, alone.indivisible)), rows)
        self._gave_way = bool(rows)
        if rows:
            return list(rows.values())
        for sequence in list(self.running):
            if sequence.remaining == 1:
                self._plan(sequence, 1, rows)
        budget = min(self.step_tokens - len(rows), prefill_tokens)
        for sequence in list(self.running):
            if budget <= 0:
                break
            if sequence.remaining > 1:
                budget -= self._plan(sequence, min(sequence.remaining, budget), rows)
        self._admit(budget, rows)
        return list(rows.values())

    def complete(self, row: Row) -> None:
        """Notes that a row's ids have been computed: their blocks can be used by others."""
        sequence = row.sequence
        before, sequence.computed = sequence.computed, row.start + row.count
        if self._reuses_prefixes:
            size = self.blocks.block_tokens
            first, end = before // size, sequence.computed // size
            if first < end:
                names = sequence.block_names(end, size)
                for index in range(first, end):
                    self.blocks.name(sequence.blocks[index], names[index])

    def remove(self, sequence: Sequence, forget: bool = False) -> list[int]:
        """Takes out a sequence that has ended; the blocks that are void now. With `forget` none is reused."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence in self._alone:
            self._alone.remove(sequence)
        return self._release(sequence, forget)

    def preempt(self, sequence: Sequence) -> None:
        """Takes its blocks from a running sequence, which goes back to its place in the queue."""
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=precedence)
        sequence.preempt()
        self.preempted += 1

    def make_room(self, rows: list[Row]) -> Sequence | None:
        """After a step that memory was too small for: smaller steps, then fewer sequences at once.

        Returns the sequence that has to fail where neither is left.
        """
        self._steps_since_shortage = 0
        if self.step_tokens > _LEAST_STEP_TOKENS and any(row.count > 1 for row in rows):
            self.step_tokens = max(_LEAST_STEP_TOKENS, self.step_tokens // 2)
            return None
        newest = self.running[-1]
        if len(self.running) == 1:
            return newest
        self.preempt(newest)
        # Otherwise it would return in the next step, and no sequence would make progress.
        self.max_running = len(self.running)
        return None

    def regain(self) -> None:
        """After a step that memory sufficed for: takes back, little by little, what `make_room` gave up."""
        self._steps_since_shortage += 1
        if self._steps_since_shortage % _STEPS_TO_REGAIN == 0:
            self.step_tokens = min(self._most_step_tokens, 2 * self.step_tokens)
            self.max_running = min(self._most_running, self.max_running + 1)

    def restore(self) -> None:
        """Takes all of it back, when nothing runs."""
        self.step_tokens, self.max_running = self._most_step_tokens, self._most_running

    def _next_alone(self) -> Sequence | None:
        """The sequence that the next step belongs to: one that runs alone, or begins to."""
        self._alone = [sequence for sequence in self._alone if sequence.alone]
        running = self._running_alone()
        if running is not None or (self._gave_way and self.running) or len(self.running) >= self.max_running:
            return running
        for sequence in self.waiting:
            cached, pending = self._find_cached(sequence)
            if not pending:
                if not sequence.alone or not self._has_blocks(sequence, cached):
                    return None
                self.waiting.remove(sequence)
                self._start(sequence, cached)
                return sequence
        return None

    def _admit(self, budget: int, rows: dict[Sequence, Row]) -> None:
        """Starts waiting sequences while there are rows, tokens and blocks for them."""
        self._full = False
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running or budget <= 0:
                return
            if not sequence.limited(1, self._scores_left):
                # What is scored takes its turn with those that run; what follows it in the queue may go first.
                continue
            if sequence.indivisible > budget and any(row.count > 1 for row in rows.values()):
                return
            cached, pending = self._find_cached(sequence)
            if pending:
                # Another sequence computes the next block; what follows it in the queue may go first.
                continue
            if sequence.alone:
                return
            if not self._has_blocks(sequence, cached):
                self._full = True
                return
            self.waiting.remove(sequence)
            self._start(sequence, cached)
            budget -= self._plan(sequence, min(sequence.remaining, max(budget, sequence.indivisible)), rows)

    def _running_alone(self) -> Sequence | None:
        return next((sequence for sequence in self._alone if sequence.alone and sequence in self.running), None)

    def _has_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether there are blocks for what is known of a sequence that would start; the only one always has."""
        needed = self.blocks.blocks_for(len(sequence.ids) + 1) - len(cached)
        return not self.running or needed <= self.blocks.free - self.blocks.idle(cached)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        insort(self.running, sequence, key=precedence)
        self.blocks.share(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self.blocks.block_tokens
        if sequence.timeline.started is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.input_ids))
        if self._reuses_prefixes:
            full = len(sequence.ids) // self.blocks.block_tokens
            sequence.announced = sequence.block_names(full, self.blocks.block_tokens)[len(cached) :]
            self.blocks.announce(sequence.announced)

    def _find_cached(self, sequence: Sequence) -> tuple[list[int], bool]:
        if not self._reuses_prefixes:
            return [], False
        full = sequence.reusable // self.blocks.block_tokens
        return self.blocks.find(sequence.block_names(full, self.blocks.block_tokens))

    def _plan(self, sequence: Sequence, count: int, rows: dict[Sequence, Row]) -> int:
        """Adds a row of up to `count` ids, as far as blocks can be had; how many it has."""
        if sequence not in self.running:
            return 0
        count = sequence.limited(count, self._scores_left)
        if count == 0:
            return 0
        wanted = self.blocks.blocks_for(sequence.computed + count)
        while len(sequence.blocks) < wanted:
            block = self.blocks.take()
            if block is not None:
                sequence.blocks.append(block)
            elif self.running[-1] is not sequence:
                rows.pop(self.running[-1], None)
                self.preempt(self.running[-1])
            else:
                break
        count = min(count, len(sequence.blocks) * self.blocks.block_tokens - sequence.computed)
        if count >= (sequence.indivisible if sequence.computed == 0 else 1):
            rows[sequence] = row = Row(sequence, sequence.computed, count)
            self._scores_left -= len(row.scores)
            return count
        # It is the newest, and there is no block for it.
        self.preempt(sequence)
        return 0

    def _release(self, sequence: Sequence, forget: bool = False) -> list[int]:
        self.blocks.withdraw(sequence.announced)
        sequence.announced = []
        released = self.blocks.release(sequence.blocks, forget)
        sequence.blocks = []
        sequence.computed = 0
        sequence.state = None
        return released


def precedence(sequence: Sequence) -> tuple[bool, int]:
    """First come, first served, but for those that go on from elsewhere: their readers are in mid-sentence."""
    return not sequence.request.moved, sequence.number
