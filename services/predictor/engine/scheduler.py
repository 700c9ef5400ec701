"""Chooses which ids of which sequences the next step computes.

Pure: no thread, no clock, no model. A step takes every sequence that waits for its next token, then chunks of prompts
up to the step's budget of tokens, then new sequences. First come, first served, with requests that resume an
interrupted answer before new ones. If blocks run out, the last of the running sequences is preempted: it frees its
blocks and is computed again later, so the first always continues and none starves.

An isolated sequence (`alone`) waits for its turn like any other. From the step in which its computation begins until
its next token, or its end, it has every step to itself: the others keep their blocks and wait. Between two isolated
sequences the others have a step.
"""

from __future__ import annotations

from bisect import insort
from itertools import count as counter

from millrace.errors import InvalidRequestError, OverloadedError
from services.predictor.engine.state.blocks import BlockManager
from services.predictor.engine.state.sequence import Row, Sequence

_LEAST_STEP_TOKENS = 16
_STEPS_TO_REGAIN = 64
# Maximum of prompt positions that one step scores, in all its rows together: each needs the logits of the whole
# vocabulary, which take memory and delay the step's other rows.
_MAX_SCORED = 64


class Scheduler:
    """Owns the queue of waiting sequences, the list of running ones (oldest first), and their blocks.

    `step_tokens` is the maximum that a step computes, except that an encoder's prompt, which cannot be divided, may
    exceed it. `reuses_prefixes`: the contents of a block depend only on the ids up to its end.
    """

    def __init__(
        self, blocks: BlockManager, max_running: int, max_waiting: int, step_tokens: int, reuses_prefixes: bool = True
    ) -> None:
        self.blocks = blocks
        # Both sorted by `precedence`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step_tokens = self._most_step_tokens = max(step_tokens, max_running)
        self.max_running = self._most_running = max_running
        self.preempted = 0
        self._steps_since_shortage = 0
        self._alone: list[Sequence] = []  # Isolated ones whose next token is not there yet, in order of arrival.
        self._gave_way = False  # Whether the latest step was that of an isolated sequence.
        self._full = False  # Whether the latest step had no blocks for the next sequence.
        self._max_waiting = max_waiting
        self._reuses_prefixes = reuses_prefixes
        self._arrivals = counter()
        self._scores_left = 0  # Prompt positions that this step can still score.

    @property
    def streams(self) -> int:
        """The number of running sequences that lack only their next token."""
        return sum(sequence.remaining == 1 for sequence in self.running)

    @property
    def prompts(self) -> int:
        """The number of sequences with more to compute: running ones, and waiting ones for which there is a slot."""
        places = self.max_running - len(self.running)
        return len(self.running) - self.streams + min(places, len(self.waiting))

    @property
    def prefill_start(self) -> int:
        """The number of ids that are already computed of the first sequence with more to compute."""
        return next((sequence.computed for sequence in self.running if sequence.remaining > 1), 0)

    def queue_before(self, sequence: Sequence) -> int:
        """The number of sequences that wait for another's end and precede a new one."""
        if not self._full and len(self.running) < self.max_running:
            return 0
        if not sequence.request.moved:
            return len(self.waiting)
        return sum(waiting.request.moved for waiting in self.waiting)

    @property
    def contended(self) -> bool:
        """Whether a slot that a waiting sequence does not take would go to another one."""
        places = 0 if self._full else self.max_running - len(self.running)
        return len(self.waiting) > max(1, places)

    @property
    def due(self) -> list[Sequence]:
        """The running sequences that every step must serve: an isolated one, else those that decode and the oldest."""
        alone = self._running_alone()
        if alone is not None:
            return [alone]
        return [sequence for i, sequence in enumerate(self.running) if i == 0 or sequence.remaining == 1]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended, the running ones first."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence, retry_after_ms: int) -> None:
        """Queues a sequence; refuses it if it can never fit or if the queue is full."""
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
        """The rows of the next step: an isolated sequence, or all that decode and up to `prefill_tokens` of prompts."""
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
        """Records that a row's ids have been computed: other sequences can reuse their blocks."""
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
        """Removes a sequence that has ended; returns the blocks that are void now. With `forget` none is reusable."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence in self._alone:
            self._alone.remove(sequence)
        return self._release(sequence, forget)

    def preempt(self, sequence: Sequence) -> None:
        """Frees the blocks of a running sequence and returns it to its place in the queue."""
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=precedence)
        sequence.preempt()
        self.preempted += 1

    def make_room(self, rows: list[Row]) -> Sequence | None:
        """Reduces the load after a step ran out of memory: first smaller steps, then fewer sequences at once.

        Returns the sequence that must fail if neither is possible.
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
        """Called after a step that fit: undoes, gradually, what `make_room` reduced."""
        self._steps_since_shortage += 1
        if self._steps_since_shortage % _STEPS_TO_REGAIN == 0:
            self.step_tokens = min(self._most_step_tokens, 2 * self.step_tokens)
            self.max_running = min(self._most_running, self.max_running + 1)

    def restore(self) -> None:
        """Undoes all of it, when nothing runs."""
        self.step_tokens, self.max_running = self._most_step_tokens, self._most_running

    def _next_alone(self) -> Sequence | None:
        """The sequence that has the next step to itself: an isolated one that runs or begins."""
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
        """Starts waiting sequences while there are slots, tokens and blocks for them."""
        self._full = False
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running or budget <= 0:
                return
            if not sequence.limited(1, self._scores_left):
                # No scores left in this step; sequences behind it in the queue may go first.
                continue
            if sequence.indivisible > budget and any(row.count > 1 for row in rows.values()):
                return
            cached, pending = self._find_cached(sequence)
            if pending:
                # Another sequence computes the next block; sequences behind it in the queue may go first.
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
        """Whether there are blocks for the known ids of a sequence that would start; the only one always fits."""
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
        """Adds a row of up to `count` ids, as far as there are blocks; returns the number of its ids."""
        if sequence not in self.running:
            return 0
        count = sequence.limited(count, self._scores_left)
        if count == 0:
            return 0
        block_count = self.blocks.blocks_for(sequence.computed + count)
        while len(sequence.blocks) < block_count:
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
    """The order of service: first come, first served, with requests that resume an interrupted answer first."""
    return not sequence.request.moved, sequence.number
