"""After any sequence of events in the scheduler, no block is leaked or shared wrongly, and every sequence ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import InvalidRequestError, OverloadedError
from headrace_predictor.engine.state.sequence import precedence
from tests.unit.test_scheduler import SIZE, scheduler_of, sequence

VOID = [-1] * SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Random events for decoders that share prefixes. Its memory is a model: a block holds the ids themselves."""

    start_ids = ()
    max_running = 3

    @initialize(blocks=st.integers(5, 14), step_tokens=st.integers(1, 12))
    def start(self, blocks, step_tokens):
        self.scheduler = scheduler_of(blocks, self.max_running, 4, step_tokens, not self.start_ids)
        self.manager = self.scheduler.blocks
        self.memory = [VOID[:] for _ in range(blocks + 1)]
        self.forgot = False
        self.alone = None
        self.meanings = {}

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 22),
        tail=st.lists(st.integers(0, 2), max_size=3),
        salt=st.sampled_from(["", "tenant"]),
        output_ids=st.lists(st.integers(0, 2), max_size=6),
        more=st.integers(1, 12),
        alone=st.integers(0, 3).map(lambda i: i == 3),
    )
    def submit(self, stem, length, tail, salt, output_ids, more, alone):
        prompt = [50 * stem + i for i in range(length)] + tail
        new = sequence(prompt, len(output_ids) + more, salt, output_ids, self.start_ids, alone)
        full = len(self.scheduler.waiting) >= 4 and len(self.scheduler.sequences) >= self.scheduler.max_running
        try:
            self.scheduler.add(new, 5)
        except InvalidRequestError:
            assert self.manager.blocks_for(new.longest) > self.manager.total
        except OverloadedError:
            assert full
        else:
            assert self.manager.blocks_for(new.longest) <= self.manager.total
            assert not full

    @rule(
        prefill_tokens=st.integers(1, 12),
        token_ids=st.lists(st.integers(0, 2), min_size=3, max_size=3),
        forced=st.sampled_from([(0, 0, 0), (0, 5, 1), (2, 0, 9)]),
    )
    def step(self, prefill_tokens, token_ids, forced=(0, 0, 0)):
        for row, token_id, more in zip(self.schedule(prefill_tokens), token_ids, forced, strict=False):
            self.finish(row, token_id, more)

    @rule(culprit=st.integers(0, 2), prefill_tokens=st.integers(1, 12))
    def step_that_fails_for_one(self, culprit, prefill_tokens):
        rows = self.schedule(prefill_tokens)
        for index, row in enumerate(rows):
            if index == culprit % len(rows):
                self.write(row, poisoned=True)
                self.scheduler.complete(row)
                self.end(row.sequence, forget=True)
            else:
                self.finish(row, 1)

    @rule(prefill_tokens=st.integers(1, 12))
    def step_without_memory(self, prefill_tokens):
        rows = self.schedule(prefill_tokens)
        if rows:
            hopeless = self.scheduler.make_room(rows)
            if hopeless is not None:
                self.end(hopeless, forget=True)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(which=st.integers(0, 9))
    def cancel(self, which):
        sequences = self.scheduler.sequences
        self.end(sequences[which % len(sequences)])

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 9))
    def preempt(self, which):
        self.scheduler.preempt(self.scheduler.running[which % len(self.scheduler.running)])

    @rule()
    def memory_is_back(self):
        self.scheduler.restore()

    def schedule(self, prefill_tokens):
        scheduler = self.scheduler
        before, decoding = list(scheduler.running), [one for one in scheduler.running if one.decodes]
        held = {one: (list(one.blocks), one.computed) for one in before}
        rows = scheduler.schedule(prefill_tokens)
        was_alone, self.alone = self.alone, next((one for one in scheduler.running if one.alone), None)
        assert bool(rows) == bool(scheduler.sequences)
        assert len({row.sequence for row in rows}) == len(rows)
        for row in rows:
            assert row.sequence in scheduler.running
            assert row.count >= 1
            assert row.start == row.sequence.computed
            assert row.start + row.count <= min(len(row.sequence.ids), SIZE * len(row.sequence.blocks))
        scheduled = [row.sequence for row in rows]
        assert sum(one.alone for one in scheduler.running) <= 1
        if self.alone is not None:
            # It has the step to itself, and the others keep what they hold.
            assert scheduled == [self.alone]
            assert all(one in scheduler.running for one in before)
            assert all(held[one] == (one.blocks, one.computed) for one in before if one is not self.alone)
            # Nor does one isolated step follow another while others wait for a step.
            assert was_alone in (None, self.alone) or not [one for one in before if one is not self.alone]
            return rows
        assert all(one in scheduled or one in scheduler.waiting for one in decoding)
        prompts = [row.count for row in rows if row.sequence not in decoding]
        # One that decodes may have lost its blocks, and with them its place in the step, to an older one.
        decoded = [row.count for row in rows if row.sequence in decoding]
        assert sum(decoded) <= max(scheduler.step_tokens, len(decoded))
        budget = scheduler.step_tokens - sum(decoded)
        if self.start_ids:
            # A prompt that cannot be divided may exceed the budget, but is then the only one.
            assert len(prompts) == 1 or sum(prompts) <= max(budget, 0)
        else:
            assert sum(prompts) <= max(0, min(budget, prefill_tokens) if decoding else budget)
        if before:
            # The first sequence always progresses.
            assert before[0] in scheduled
        for new in scheduler.running:
            if new not in before:
                overtaken = [
                    one for one in scheduler.waiting if precedence(one) < precedence(new) and one not in before
                ]
                assert all(self.waits_for_a_block(one) for one in overtaken)
        return rows

    def waits_for_a_block(self, waiting):
        full = (len(waiting.ids) - 1) // SIZE
        return self.manager.find(waiting.block_names(full, SIZE))[1]

    def write(self, row, poisoned=False):
        for position in range(row.start, row.start + row.count):
            block = row.sequence.blocks[position // SIZE]
            self.memory[block][position % SIZE] = -9 if poisoned else row.sequence.ids[position]

    def finish(self, row, token_id, forced=0):
        self.write(row)
        self.scheduler.complete(row)
        # The model would read exactly the sequence's ids.
        one = row.sequence
        held = [self.memory[one.blocks[p // SIZE]][p % SIZE] for p in range(one.computed)]
        assert held == one.ids[: one.computed]
        if not row.samples:
            return
        reason = one.append(token_id)
        while forced and reason is None:
            reason, forced = one.append_forced(token_id), forced - 1
        if reason is not None:
            self.end(one)

    def end(self, one, forget=False):
        released = self.scheduler.remove(one, forget)
        assert (one.blocks, one.computed, one.announced) == ([], 0, [])
        self.forgot |= forget
        # Void contents may be overwritten: no sequence can read them any more.
        for block in released:
            self.memory[block] = VOID[:]

    @invariant()
    def every_reference_has_a_holder(self):
        held = [block for one in self.scheduler.running for block in one.blocks]
        for block, references in enumerate(self.manager._references):
            assert references == held.count(block)
        assert 0 not in held
        assert set(self.manager._idle) == set(range(1, self.manager.total + 1)) - set(held)
        assert self.manager.free + len(set(held)) == self.manager.total
        assert all(one.blocks == [] for one in self.scheduler.waiting)

    @invariant()
    def blocks_are_shared_only_where_ids_and_salts_are_equal(self):
        uses = [(b, i, one) for one in self.scheduler.running for i, b in enumerate(one.blocks)]
        for block, index, one in uses:
            for other_block, other_index, other in uses:
                if block == other_block and one is not other:
                    end = SIZE * (index + 1)
                    assert index == other_index
                    assert one.ids[:end] == other.ids[:end]
                    assert len(one.ids) >= end
                    assert min(one.computed, other.computed) >= end
                    assert one.sampling.cache_salt == other.sampling.cache_salt
                    assert self.forgot or self.manager._names[block] is not None

    @invariant()
    def names_belong_to_complete_contents(self):
        for name, block in self.manager._by_name.items():
            assert self.manager._names[block] == name
            assert all(id_ >= 0 for id_ in self.memory[block])
        for one in self.scheduler.running:
            for index in range(one.computed // SIZE):
                name = self.manager._names[one.blocks[index]]
                if name is not None:
                    meaning = one.sampling.cache_salt, one.ids[: SIZE * (index + 1)]
                    assert self.meanings.setdefault(name, meaning) == meaning
        assert len(self.manager._by_name) == sum(name is not None for name in self.manager._names)
        if self.start_ids:
            assert not self.manager._by_name

    @invariant()
    def only_running_sequences_announce(self):
        assert self.manager._announced <= {name for one in self.scheduler.running for name in one.announced}

    @invariant()
    def the_limits_hold(self):
        assert len(self.scheduler.running) <= self.max_running
        assert len(self.scheduler.waiting) <= 4 + self.max_running
        for group in (self.scheduler.running, self.scheduler.waiting):
            assert group == sorted(group, key=precedence)

    def teardown(self):
        """In the end every sequence ends when steps go on, and all blocks are free again."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.restore()
        steps = 0
        while self.scheduler.sequences:
            self.step(4, [1] * self.max_running)
            steps += 1
            assert steps < 1000
        self.every_reference_has_a_holder()
        assert self.manager.free == self.manager.total
        assert not self.manager._announced


class EncoderDecoderMachine(SchedulerMachine):
    """The same for encoder-decoder models, whose prompts are computed whole and never shared."""

    start_ids = (0,)


limits = settings(stateful_step_count=40)
TestDecoders = SchedulerMachine.TestCase
TestDecoders.settings = limits
TestEncoderDecoders = EncoderDecoderMachine.TestCase
TestEncoderDecoders.settings = limits
