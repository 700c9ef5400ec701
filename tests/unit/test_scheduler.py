"""The scheduler: first come, first served, within its limits, and every block comes back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.errors import InvalidRequestError, OverloadedError
from millrace.sampling import SamplingParameters
from services.predictor.engine.blocks import BlockManager
from services.predictor.engine.interface import GenerationRequest
from services.predictor.engine.scheduler import Scheduler
from services.predictor.engine.sequence import Sequence
from services.predictor.engine.slot import MergingSlot

SIZE = 4
VOID = [-1] * SIZE


def sequence(prompt=4, max_tokens=4, salt="", output_ids=(), start_ids=()):
    """Of a prompt, or of so many ids that no other one has."""
    sequence.made += 1
    ids = [100 * sequence.made + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    sampling = SamplingParameters(max_tokens=max_tokens, seed=1, cache_salt=salt)
    request = GenerationRequest(str(sequence.made), ids, sampling, list(output_ids))
    return Sequence(request, MergingSlot(sampling), frozenset(), start_ids)


sequence.made = 0


def scheduler_of(blocks=25, max_running=4, max_waiting=8, step_tokens=16, reuses_prefixes=True):
    return Scheduler(BlockManager(blocks + 1, SIZE), max_running, max_waiting, step_tokens, reuses_prefixes)


def step(scheduler, prefill_tokens=64, token_id=7):
    """Runs a step that goes well; its rows as (sequence, start, count). A sequence that ends is taken out."""
    rows = scheduler.schedule(prefill_tokens)
    for row in rows:
        scheduler.complete(row)
        if row.samples and row.sequence.append(token_id) is not None:
            scheduler.remove(row.sequence)
    return [(row.sequence, row.start, row.count) for row in rows]


def added(scheduler, *sequences):
    for one in sequences:
        scheduler.add(one, 0)
    return sequences


def test_first_come_first_served():
    scheduler = scheduler_of(max_running=2)
    first, second, third = added(scheduler, sequence(), sequence(), sequence())
    assert [row[0] for row in step(scheduler)] == [first, second]
    scheduler.remove(first)
    assert [row[0] for row in step(scheduler)] == [second, third]


def test_a_large_sequence_is_not_overtaken_by_small_ones():
    scheduler = scheduler_of(blocks=4)
    running, large, small = added(scheduler, sequence(9, 3), sequence(8, 4), sequence(1, 1))
    assert [row[0] for row in step(scheduler)] == [running]
    scheduler.remove(running)
    assert [row[0] for row in step(scheduler)] == [large, small]


def test_what_can_never_fit_is_refused_at_once():
    scheduler = scheduler_of(blocks=5)
    with pytest.raises(InvalidRequestError, match="need 30 tokens, the cache holds 20"):
        scheduler.add(sequence(20, 10), 0)
    scheduler.add(sequence(10, 10), 0)


def test_a_full_queue_says_when_to_come_back():
    scheduler = scheduler_of(max_running=1, max_waiting=1)
    added(scheduler, sequence())
    step(scheduler)
    added(scheduler, sequence())
    with pytest.raises(OverloadedError) as raised:
        scheduler.add(sequence(), 250)
    assert raised.value.retry_after_ms == 250


def test_prompts_are_cut_to_what_is_left_beside_those_that_decode():
    scheduler = scheduler_of(step_tokens=8)
    decoding, long = added(scheduler, sequence(3, 8), sequence(20, 4))
    assert step(scheduler) == [(decoding, 0, 3), (long, 0, 5)]
    assert step(scheduler) == [(decoding, 3, 1), (long, 5, 7)]
    assert step(scheduler, prefill_tokens=2) == [(decoding, 4, 1), (long, 12, 2)]


def test_an_encoder_s_prompt_is_never_cut():
    scheduler = scheduler_of(step_tokens=8, reuses_prefixes=False)
    first, second = added(scheduler, sequence(20, 4, start_ids=(0,)), sequence(20, 4, start_ids=(0,)))
    assert step(scheduler) == [(first, 0, 21)]
    assert step(scheduler) == [(first, 21, 1), (second, 0, 21)]


def test_where_blocks_run_out_the_newest_gives_its_own_and_the_oldest_goes_on():
    scheduler = scheduler_of(blocks=4)
    old, new = added(scheduler, sequence(7, 9), sequence(7, 9))
    while scheduler.preempted == 0:
        assert step(scheduler)[0][0] is old
    assert (scheduler.running, scheduler.waiting) == ([old], [new])
    assert new.blocks == []
    for _ in range(30):
        step(scheduler)
    assert (len(old.output_ids), len(new.output_ids)) == (9, 9)
    assert scheduler.blocks.free == scheduler.blocks.total


def test_the_second_of_two_equal_prompts_waits_for_the_first_ones_blocks():
    scheduler = scheduler_of(step_tokens=8)
    first, second, other = added(scheduler, sequence(range(10)), sequence(range(10)), sequence(2))
    assert step(scheduler) == [(first, 0, 8)]
    # Both blocks are there: only what follows them is left.
    assert step(scheduler) == [(first, 8, 2), (second, 8, 2), (other, 0, 2)]
    assert second.blocks[:2] == first.blocks[:2]
    assert second.cached_tokens == 8


def test_a_sequence_that_waits_for_anothers_block_goes_on_when_the_other_is_cancelled():
    scheduler = scheduler_of(step_tokens=8)
    first, second = added(scheduler, sequence(range(20)), sequence(range(20)))
    assert step(scheduler) == [(first, 0, 8)]
    assert step(scheduler) == [(first, 8, 8)]
    scheduler.remove(first)
    assert step(scheduler) == [(second, 16, 4)]


def test_a_sequence_that_waits_for_a_poisoned_block_computes_it_itself():
    scheduler = scheduler_of(step_tokens=8)
    first, second = added(scheduler, sequence(range(20)), sequence(range(20)))
    step(scheduler)
    scheduler.remove(first, forget=True)
    assert step(scheduler) == [(second, 0, 8)]


def test_a_shortage_of_memory_makes_steps_smaller_then_fewer_run_then_one_fails():
    scheduler = scheduler_of(step_tokens=64, blocks=100)
    old, new = added(scheduler, sequence(40, 8), sequence(40, 8))
    for expected in (32, 16):
        assert scheduler.make_room(scheduler.schedule(64)) is None
        assert scheduler.step_tokens == expected
    rows = scheduler.schedule(64)
    assert sum(row.count for row in rows) <= 16
    while len(scheduler.running) < 2:
        step(scheduler)
    assert scheduler.make_room(scheduler.schedule(64)) is None
    assert (scheduler.running, scheduler.waiting) == ([old], [new])
    # It is not back at once: then nobody would get on.
    assert [row.sequence for row in scheduler.schedule(64)] == [old]
    assert scheduler.make_room(scheduler.schedule(64)) is old


def test_after_a_shortage_steps_grow_again():
    scheduler = scheduler_of(step_tokens=64, max_running=4)
    added(scheduler, sequence(40, 8), sequence(4, 8))
    for _ in range(2):
        scheduler.make_room(scheduler.schedule(64))
    for _ in range(3):
        step(scheduler)
    scheduler.make_room(scheduler.schedule(64))
    assert (scheduler.step_tokens, scheduler.max_running) == (16, 1)
    for _ in range(1000):
        scheduler.regain()
    assert (scheduler.step_tokens, scheduler.max_running) == (64, 4)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen to decoders that share prefixes. The memory is real: a block holds the ids themselves."""

    start_ids = ()
    max_running = 3

    @initialize(blocks=st.integers(5, 14), step_tokens=st.integers(1, 12))
    def start(self, blocks, step_tokens):
        self.scheduler = scheduler_of(blocks, self.max_running, 4, step_tokens, not self.start_ids)
        self.manager = self.scheduler.blocks
        self.memory = [VOID[:] for _ in range(blocks + 1)]
        self.forgot = False

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 22),
        tail=st.lists(st.integers(0, 2), max_size=3),
        salt=st.sampled_from(["", "tenant"]),
        output_ids=st.lists(st.integers(0, 2), max_size=6),
        more=st.integers(1, 12),
    )
    def submit(self, stem, length, tail, salt, output_ids, more):
        prompt = [50 * stem + i for i in range(length)] + tail
        new = sequence(prompt, len(output_ids) + more, salt, output_ids, self.start_ids)
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

    @rule(prefill_tokens=st.integers(1, 12), token_ids=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def step(self, prefill_tokens, token_ids):
        for row, token_id in zip(self.schedule(prefill_tokens), token_ids, strict=False):
            self.finish(row, token_id)

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
        before, decoding = list(scheduler.running), [one for one in scheduler.running if one.remaining == 1]
        rows = scheduler.schedule(prefill_tokens)
        assert bool(rows) == bool(scheduler.sequences)
        assert len({row.sequence for row in rows}) == len(rows)
        for row in rows:
            assert row.sequence in scheduler.running
            assert row.count >= 1
            assert row.start == row.sequence.computed
            assert row.start + row.count <= min(len(row.sequence.ids), SIZE * len(row.sequence.blocks))
        scheduled = [row.sequence for row in rows]
        assert all(one in scheduled or one in scheduler.waiting for one in decoding)
        prompts = [row.count for row in rows if row.sequence not in decoding]
        budget = scheduler.step_tokens - len(decoding)
        if self.start_ids:
            # One that cannot be divided may be more than the budget, but is then the only one.
            assert len(prompts) == 1 or sum(prompts) <= max(budget, 0)
        else:
            assert sum(prompts) <= max(0, min(budget, prefill_tokens) if decoding else budget)
        if before:
            # The oldest always goes on.
            assert before[0] in scheduled
        for new in scheduler.running:
            if new not in before:
                overtaken = [one for one in scheduler.waiting if one.number < new.number and one not in before]
                assert all(self.waits_for_a_block(one) for one in overtaken)
        return rows

    def waits_for_a_block(self, waiting):
        full = (len(waiting.ids) - 1) // SIZE
        return self.manager.find(waiting.block_names(full, SIZE))[1]

    def write(self, row, poisoned=False):
        for position in range(row.start, row.start + row.count):
            block = row.sequence.blocks[position // SIZE]
            self.memory[block][position % SIZE] = -9 if poisoned else row.sequence.ids[position]

    def finish(self, row, token_id):
        self.write(row)
        self.scheduler.complete(row)
        # What the model would read is what the sequence is.
        one = row.sequence
        held = [self.memory[one.blocks[p // SIZE]][p % SIZE] for p in range(one.computed)]
        assert held == one.ids[: one.computed]
        if row.samples and one.append(token_id) is not None:
            self.end(one)

    def end(self, one, forget=False):
        released = self.scheduler.remove(one, forget)
        assert (one.blocks, one.computed, one.announced) == ([], 0, [])
        if forget:
            self.forgot = True
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
                    assert one.request.sampling.cache_salt == other.request.sampling.cache_salt
                    assert self.forgot or self.manager._names[block] is not None

    @invariant()
    def names_belong_to_complete_contents(self):
        for name, block in self.manager._by_name.items():
            assert self.manager._names[block] == name
            assert all(id_ >= 0 for id_ in self.memory[block])
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
            assert [one.number for one in group] == sorted(one.number for one in group)

    def teardown(self):
        """Whatever happened, every sequence ends when it is driven, and all blocks are back."""
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
    """The same for encoder-decoder models, whose prompts are computed at once and never shared."""

    start_ids = (0,)


limits = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDecoders = SchedulerMachine.TestCase
TestDecoders.settings = limits
TestEncoderDecoders = EncoderDecoderMachine.TestCase
TestEncoderDecoders.settings = limits
