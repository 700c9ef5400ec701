"""Chooses which ids of which sequences the next step computes.

Pure: no thread, no clock, no model. A step takes every sequence that waits for its next token, then chunks of prompts
up to the step's budget of tokens, then new sequences. First come, first served, by priority, with requests that resume
an interrupted answer before new ones. If blocks run out, the last of the running sequences is preempted: it frees its
blocks and is computed again later, so the first always continues and none starves.

Clients that compete have turns instead (state/shares.py), and each client's own sequences are served as above. The one
with the least service is the first to have prompts computed. If it has fewer running sequences or blocks than its
share, others are preempted for it; a step may leave out the rows of clients with far more, never two steps in a row;
and when the queue is full, the client with the most in it gives way.

An isolated sequence (`alone`) waits for its turn like any other. From the step in which its computation begins until
its next token, or its end, it has every step to itself: the others keep their blocks and wait. Between two isolated
sequences the others have a step.

A sequence with a pace (`SamplingParameters.pace`) has its next token at `due_at` at the earliest. Until then it keeps
its blocks, and steps leave it out. It takes no slot meanwhile: others run in its place, and where more are due than
there are slots, steps take turns with them.
"""

from collections.abc import Iterable, Iterator

from headrace_predictor.engine.state.in_flight import InFlight
from headrace_predictor.engine.state.sequence import Row, Sequence, precedence

# Maximum of prompt positions that one step scores, in all its rows together: each needs the logits of the whole
# vocabulary, which take memory and delay the step's other rows.
_MAX_SCORED = 64
_GATHER_S, _LOOK_S = 0.002, 0.05  # See pause_s.
_FOLLOWED = 16  # Steps without a plan while others wait: only a plan ends those that are late or cancelled.
_HELD = 3  # Sequences without a slot, for each slot.


class Scheduler(InFlight):
    """Plans steps, and preempts where slots, blocks or memory run short."""

    _without_slot = 0  # Running sequences that their pace holds in this step.
    _turn = 0  # Of the sequences that are due, where there are more than slots.
    _gave_way = False  # Whether the latest step was that of an isolated sequence.
    _full = False  # Whether the latest step had no blocks for the next sequence.
    _closed = False  # Whether this step starts no more sequences.
    _took_slot = False  # Whether this step has preempted a sequence for another client's.
    _left_out = False  # Whether the latest step left out the rows of clients.
    _scores_left = 0  # Prompt positions that this step can still score.
    _now = 0.0  # Of this step.
    _followed = 0  # Steps since then that followed without a plan.

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """Of each sequence with more to compute, how many of its ids are computed, and how many are left.

        Running ones, and waiting ones for which there is a slot.
        """
        # A client may get a slot that another one has.
        places = max(self._free_slots, int(self._shares.competing))
        due = [sequence for sequence in self.running if not sequence.decodes] + self.waiting[:places]
        return [(sequence.computed, sequence.remaining) for sequence in due]

    def queue_before(self, sequence: Sequence) -> int:
        """The number of sequences that wait for another's end and are expected to start before a new one."""
        if not self._full and self._free_slots > 0:
            return 0
        # The new one has no number yet: of its equals it is the last.
        client, place = sequence.client, precedence(sequence)[:-1]
        own = sum(one.client == client and precedence(one)[:-1] <= place for one in self.waiting)
        return min(len(self.waiting), self._shares.stretched(sequence, own))

    @property
    def contended(self) -> bool:
        """Whether a slot that a waiting sequence does not take would go to another one."""
        places = 0 if self._full else self._free_slots
        return len(self.waiting) > max(1, places)

    @property
    def due(self) -> list[Sequence]:
        """The running sequences that every step must serve: an isolated one, else those that decode and the oldest.

        Clients that compete take turns with their prompts, so only one that decodes is in every step, or every other.
        """
        alone = self._running_alone()
        if alone is not None:
            return [alone]
        oldest = self.running[0] if self.running and not self._shares.competing else None
        return [
            sequence
            for sequence in self.running
            if (sequence is oldest or sequence.decodes) and sequence.due_at <= self._now
        ]

    @property
    def pause_s(self) -> float:
        """After a step without rows: how long to wait for what its pace holds, a moment more for others that are due
        then, and not for long, because what is cancelled must end meanwhile; 0 if nothing is held."""
        next_due = min((sequence.due_at for sequence in self._held()), default=0.0)
        return min(next_due - self._now + _GATHER_S, _LOOK_S) if next_due else 0.0

    def schedule(self, prefill_tokens: int, now: float = 0.0) -> list[Row]:
        """The rows of the next step: an isolated sequence, or all that decode and up to `prefill_tokens` of prompts."""
        self._now = now
        self._followed = 0
        held = sum(sequence.due_at > now for sequence in self.running)
        self._without_slot = min(held, _HELD * self.max_running)
        rows: dict[Sequence, Row] = {}
        self._scores_left = _MAX_SCORED
        self._took_slot = False
        self.rescale()
        alone = self._next_alone() if self._alone else None
        if alone is not None:
            self._plan(alone, min(alone.remaining, max(self.step_tokens, alone.indivisible)), rows)
        self._gave_way = bool(rows)
        if not rows:
            resting = self._resting() if self._shares.competing and not self._left_out else frozenset()
            self._left_out = bool(resting) and self._compose(prefill_tokens, rows, resting)
            if not self._left_out:
                self._compose(prefill_tokens, rows)
        self._shares.charge(rows.values())
        return list(rows.values())

    def follow(self, rows: list[Row], now: float) -> list[Row]:
        """The rows of the step after one of `rows`, whose tokens are not known yet; none where it has to be planned."""
        running = [row.sequence for row in rows if row.sequence.blocks]
        if self.crowded_out or self._alone or len(self.running) > len(running):
            return []
        if self.waiting and (self._free_slots > 0 or self._shares.competing or self._followed >= _FOLLOWED):
            return []
        self._followed += 1
        following = []
        for sequence in running:
            if sequence.slot.cancelled or sequence.overdue(now) is not None:
                return []
            if len(sequence.output_ids) + 1 >= (sequence.sampling.max_tokens or 0):
                continue  # The coming token is its last.
            if len(sequence.ids) >= len(sequence.blocks) * self.blocks.block_tokens:
                block = self.blocks.take()
                if block is None:
                    return []
                sequence.blocks.append(block)
            following.append(Row.of_coming(sequence))
        return following

    def charge(self, rows: list[Row]) -> None:
        """Counts the rows of a step that was not planned as service of their clients."""
        self._shares.charge(rows)

    def make_room(self, rows: list[Row]) -> Sequence | None:
        """Reduces the load after a step ran out of memory: first smaller steps, then fewer sequences at once.

        Returns the sequence that must fail if neither is possible.
        """
        if self._limits.shorten(any(row.count > 1 for row in rows)):
            return None
        newest = self._shares.newest_of_heaviest(self.running)
        if len(self.running) == 1:
            return newest
        self.preempt(newest)
        # Otherwise it would return in the next step, and no sequence would make progress.
        self._limits.running = min(len(self.running), max(1, self.max_running - 1))
        return None

    def _next_alone(self) -> Sequence | None:
        """The sequence that has the next step to itself: an isolated one that runs or begins."""
        self._alone = [sequence for sequence in self._alone if sequence.alone]
        running = self._running_alone()
        if running is not None or (self._gave_way and self.running) or self._free_slots <= 0:
            return running
        for client in self._turns():
            for sequence in self._of(client, self.waiting):
                cached, pending = self._holdings.find(sequence)
                if not pending:
                    if not sequence.alone or not self._has_blocks(sequence, cached):
                        return None
                    self._start(sequence, cached)
                    return sequence
        return None

    def _compose(self, prefill_tokens: int, rows: dict[Sequence, Row], resting: frozenset[str] = frozenset()) -> bool:
        """Plans what decodes, then prompts; without clients that rest. Returns whether there are prompts."""
        left_out = 0
        forced = max(0, self.step_tokens - len(self.running))  # Beside one id for each sequence.
        for sequence in self._due_in_turn():
            if sequence.decodes:
                if sequence.due_at > self._now:
                    sequence.was_held = True
                elif resting and sequence.client in resting:
                    left_out += 1
                else:
                    count = min(sequence.remaining, 1 + forced)
                    forced -= count - 1
                    self._plan(sequence, count, rows)
        left = self.step_tokens - sum([row.count for row in rows.values()])
        given = budget = min(left, prefill_tokens + left_out)
        self._full = self._closed = False
        for client in self._turns():
            if client not in resting:
                for sequence in self._of(client, self.running):
                    if budget > 0 and not sequence.decodes:
                        budget -= self._plan(sequence, min(sequence.remaining, budget), rows)
                budget = self._admit(client, budget, rows)
        return budget < given

    def _admit(self, client: str | None, budget: int, rows: dict[Sequence, Row]) -> int:
        """Starts waiting sequences while there are slots, tokens and blocks for them; returns the tokens left."""
        for sequence in self._of(client, self.waiting):
            if self._closed or budget <= 0 or not self._has_slot(client):
                break
            if not sequence.limited(1, self._scores_left):
                # No scores left in this step; sequences behind it in the queue may go first.
                continue
            if sequence.indivisible > budget and not all(planned.decodes for planned in rows):
                break
            cached, pending = self._holdings.find(sequence)
            if pending:
                # Another sequence computes the next block; sequences behind it in the queue may go first.
                continue
            if not self._has_blocks(sequence, cached) and not self._take_blocks(sequence, cached, rows):
                self._closed, self._full = True, not sequence.alone
                break
            self._take_slot(client, rows)
            if sequence.alone:
                self._closed = True
                break
            self._start(sequence, cached)
            budget -= self._plan(sequence, min(sequence.remaining, max(budget, sequence.indivisible)), rows)
        return budget

    @property
    def _free_slots(self) -> int:
        return self.max_running - len(self.running) + self._without_slot

    def _due_in_turn(self) -> list[Sequence]:
        """The running sequences, of those that are due no more than there are slots beside prompts."""
        if len(self.running) <= self.max_running:
            return list(self.running)
        due = [sequence for sequence in self.running if sequence.decodes and sequence.due_at <= self._now]
        places = max(1, self.max_running - sum(not sequence.decodes for sequence in self.running))
        if len(due) <= places:
            return list(self.running)
        start = self._turn % len(due)
        self._turn = start + places
        left_out = {*(due * 2)[start + places : start + len(due)]}
        return [sequence for sequence in self.running if sequence not in left_out]

    def _held(self) -> Iterator[Sequence]:
        """The running sequences whose pace does not allow their next token yet."""
        return (sequence for sequence in self.running if sequence.due_at > self._now)

    def _turns(self) -> Iterable[str | None]:
        """The clients in the order of their turns; None stands for all sequences, if there is one client."""
        return self._shares.turns() if self._shares.competing else (None,)

    @staticmethod
    def _of(client: str | None, sequences: list[Sequence]) -> list[Sequence]:
        return [sequence for sequence in sequences if client is None or sequence.client == client]

    def _resting(self) -> frozenset[str]:
        prompts = {sequence.client for sequence in self.running if not sequence.decodes}
        return self._shares.resting(prompts.union(sequence.client for sequence in self.waiting))

    def _has_slot(self, client: str | None) -> bool:
        """Whether there is a slot, or another client must give one; at most one in a step."""
        if self._free_slots > 0:
            return True
        return client is not None and not self._took_slot and self._shares.slot_for(client, self.running) is not None

    def _take_slot(self, client: str | None, rows: dict[Sequence, Row]) -> None:
        """Makes sure of the slot that `_has_slot` promised."""
        if client is None or self._free_slots > 0:
            return
        giver = self._shares.slot_for(client, self.running)
        if giver is not None:
            self._took_slot = True
            self._give_way(giver, rows)

    def _take_blocks(self, sequence: Sequence, cached: list[int], rows: dict[Sequence, Row]) -> bool:
        """Preempts sequences of the client with the most blocks, if one with fewer than its share can then start."""
        if not self._shares.competing:
            return False
        missing, needed = self._holdings.missing(sequence, cached), self._holdings.needed(sequence, cached)
        givers = self._shares.blocks_for(sequence.client, missing, needed, self.running, self.blocks)
        for giver in givers:
            self._give_way(giver, rows)
        return bool(givers)

    def _give_way(self, sequence: Sequence, rows: dict[Sequence, Row]) -> None:
        rows.pop(sequence, None)
        self.preempt(sequence)

    def _has_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether there are blocks for the known ids of a sequence that would start; the only one always fits."""
        return not self.running or self._holdings.missing(sequence, cached) <= 0

    def _plan(self, sequence: Sequence, count: int, rows: dict[Sequence, Row]) -> int:
        """Adds a row of up to `count` ids, as far as there are blocks; returns the number of its ids."""
        computed = sequence.computed
        if count == 1 and computed and sequence.to_score <= computed < len(sequence.blocks) * self.blocks.block_tokens:
            rows[sequence] = Row(sequence, computed, 1)  # The usual case, in few operations.
            return 1
        if sequence not in self.running:
            return 0
        if sequence.due_at > self._now and sequence.indivisible == 1:
            count = min(count, sequence.remaining - 1)  # After a preemption: all but the row that samples.
        count = sequence.limited(count, self._scores_left)
        if count == 0:
            return 0
        block_count = self.blocks.blocks_for(sequence.computed + count)
        while len(sequence.blocks) < block_count:
            block = self.blocks.take()
            if block is not None:
                sequence.blocks.append(block)
                continue
            victim = self._shares.newest_of_heaviest(self.running)
            if victim is sequence:
                break
            self._give_way(victim, rows)
        count = min(count, len(sequence.blocks) * self.blocks.block_tokens - sequence.computed)
        if count >= (sequence.indivisible if sequence.computed == 0 else 1):
            rows[sequence] = row = Row(sequence, sequence.computed, count)
            self._scores_left -= len(row.scores)
            return count
        # It is the one to give way, and there is no block for it.
        self.preempt(sequence)
        return 0
