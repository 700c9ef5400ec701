"""The scheduler: first come, first served, within its limits, no sequence left out, and every block given back."""

from itertools import pairwise

import pytest

from headrace.errors import InvalidRequestError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.load import ProgressWatch
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from tests.support.requests import submission

SIZE = 4


def sequence(prompt=4, max_tokens=4, salt="", output_ids=(), start_ids=(), alone=False, moved=True):
    """A sequence of the given prompt, or of as many ids that no other sequence has."""
    sequence.made += 1
    ids = [100 * sequence.made + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    sampling = SamplingParameters(max_tokens=max_tokens, seed=1, cache_salt=salt)
    request = submission(
        str(sequence.made), ids, sampling, list(output_ids), alone=alone, moved=moved and bool(output_ids)
    )
    return Sequence(request, MergingSlot(sampling), frozenset(), start_ids)


sequence.made = 0


def scheduler_of(blocks=25, max_running=4, max_waiting=8, step_tokens=16, reuses_prefixes=True):
    return Scheduler(BlockManager(blocks + 1, SIZE), max_running, max_waiting, step_tokens, reuses_prefixes)


def step(scheduler, prefill_tokens=64, token_id=7):
    """Runs a successful step; its rows as (sequence, start, count). A sequence that ends is removed."""
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


def test_resumed_sequences_start_before_new_ones():
    scheduler = scheduler_of(max_running=1)
    running, new = added(scheduler, sequence(), sequence())
    step(scheduler)
    first, second = added(scheduler, sequence(output_ids=(7,)), sequence(output_ids=(7,)))
    assert scheduler.waiting == [first, second, new]
    assert scheduler.queue_before(sequence()) == 3
    assert scheduler.queue_before(sequence(output_ids=(7,))) == 2
    scheduler.remove(running)
    assert [row[0] for row in step(scheduler)] == [first]


def test_a_new_sequence_with_output_ids_does_not_start_before_others():
    scheduler = scheduler_of(max_running=1)
    _, new = added(scheduler, sequence(), sequence())
    step(scheduler)
    (stranger,) = added(scheduler, sequence(output_ids=(7,), moved=False))
    assert scheduler.waiting == [new, stranger]
    assert scheduler.queue_before(sequence(output_ids=(7,), moved=False)) == 2


def test_a_sequence_that_can_never_fit_is_refused_at_once():
    scheduler = scheduler_of(blocks=5)
    with pytest.raises(InvalidRequestError, match="need 30 tokens, the cache holds 20"):
        scheduler.add(sequence(20, 10), 0)
    with pytest.raises(InvalidRequestError, match="need 21 tokens"):
        # The step computes one token more than max_tokens.
        scheduler.add(sequence(10, 1, output_ids=[3] * 10), 0)
    scheduler.add(sequence(10, 10), 0)


def test_an_empty_prompt_is_refused_at_once():
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        scheduler_of().add(sequence(0), 0)


def test_prompts_are_cut_to_the_budget_left_by_decoding_sequences():
    scheduler = scheduler_of(step_tokens=8)
    decoding, long = added(scheduler, sequence(3, 8), sequence(20, 4))
    assert step(scheduler) == [(decoding, 0, 3), (long, 0, 5)]
    assert step(scheduler) == [(decoding, 3, 1), (long, 5, 7)]
    assert step(scheduler, prefill_tokens=2) == [(decoding, 4, 1), (long, 12, 2)]


def test_forced_ids_are_computed_with_their_token_as_far_as_the_step_has_room_after_all_others():
    scheduler = scheduler_of(step_tokens=8)
    first, second = added(scheduler, sequence(3, 9), sequence(4, 9))
    step(scheduler)
    for one in (first, second):
        for _ in range(4):
            one.append_forced(8)
    assert (scheduler.streams, scheduler.due) == (2, [first, second])
    assert step(scheduler) == [(first, 3, 5), (second, 4, 3)]
    assert (first.output_ids, second.output_ids) == ([7, 8, 8, 8, 8, 7], [7, 8, 8, 8, 8])
    assert step(scheduler) == [(first, 8, 1), (second, 7, 2)]


def test_an_encoder_s_prompt_is_never_cut():
    scheduler = scheduler_of(step_tokens=8, reuses_prefixes=False)
    first, second = added(scheduler, sequence(20, 4, start_ids=(0,)), sequence(20, 4, start_ids=(0,)))
    assert step(scheduler) == [(first, 0, 21)]
    assert step(scheduler) == [(first, 21, 1), (second, 0, 21)]
    scheduler = scheduler_of(blocks=60, step_tokens=8, reuses_prefixes=False)
    (alone,) = added(scheduler, sequence(20, 9, start_ids=(0,), alone=True))
    assert step(scheduler) == [(alone, 0, 21)]
    assert step(scheduler) == [(alone, 21, 1)]


def test_the_second_of_two_equal_prompts_waits_for_the_first_ones_blocks():
    scheduler = scheduler_of(step_tokens=8)
    first, second, other = added(scheduler, sequence(range(10)), sequence(range(10)), sequence(2))
    assert step(scheduler) == [(first, 0, 8)]
    # Both blocks are computed: only the tokens after them are left.
    assert step(scheduler) == [(first, 8, 2), (second, 8, 2), (other, 0, 2)]
    assert second.blocks[:2] == first.blocks[:2]
    assert second.cached_tokens == 8


def test_a_shortage_of_memory_reduces_steps_then_running_sequences_then_fails_one():
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
    # It does not return at once: else no sequence would progress.
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


def test_an_isolated_sequence_waits_for_its_turn_and_is_not_overtaken():
    scheduler = scheduler_of(max_running=2)
    first, second, alone, last = added(scheduler, sequence(), sequence(), sequence(alone=True), sequence())
    assert [row[0] for row in step(scheduler)] == [first, second]
    assert [row[0] for row in step(scheduler)] == [first, second]
    scheduler.remove(first)
    assert [row[0] for row in step(scheduler)] == [alone]
    scheduler.remove(second)
    assert [row[0] for row in step(scheduler)] == [alone, last]


def test_the_queue_counts_only_sequences_that_wait_for_anothers_end():
    scheduler = scheduler_of(max_running=1)
    added(scheduler, *(sequence() for _ in range(3)))
    assert scheduler.queue_before(sequence()) == 0
    step(scheduler)
    assert scheduler.queue_before(sequence()) == 2
    scheduler = scheduler_of(blocks=4)
    added(scheduler, sequence(9, 3), sequence(9, 3))
    step(scheduler)
    assert scheduler.queue_before(sequence()) == 1, "blocks run out as places do"


def test_places_are_contended_while_more_sequences_wait_than_are_free():
    scheduler = scheduler_of(max_running=2)
    added(scheduler, sequence(), sequence())
    assert not scheduler.contended
    added(scheduler, sequence())
    assert scheduler.contended
    step(scheduler)
    assert not scheduler.contended, "the last one would take no place from another"


def test_a_paced_sequence_needs_no_slot_until_it_is_due():
    scheduler = scheduler_of(max_running=2)
    paced, other, waiting = added(scheduler, sequence(), sequence(), sequence(max_tokens=9))
    step(scheduler)
    paced.due_at = 10.0
    rows = scheduler.schedule(64, now=9.0)
    assert [row.sequence for row in rows] == [other, waiting]
    assert scheduler.due == [other]
    assert paced.blocks, "it keeps what it has computed"
    for row in rows:
        scheduler.complete(row)
        row.sequence.append(7)
    # Three are due for two slots: none misses two steps in a row.
    served = [{row.sequence for row in scheduler.schedule(64, now=10.0)} for _ in range(6)]
    assert all(len(rows) == 2 for rows in served)
    assert all(first | second == {paced, other, waiting} for first, second in pairwise(served))


def test_the_pace_begins_after_the_tokens_that_the_client_has():
    sampling = SamplingParameters(max_tokens=9, seed=1, pace=5)
    request = submission("r", [1, 2], sampling, [3], paced_after=3)
    paced = Sequence(request, MergingSlot(sampling), frozenset(), ())
    paced.append(7)
    assert paced.due_at == 0.0
    paced.append(7)
    assert paced.due_at > 0.0


def test_many_paced_sequences_leave_slots_to_others_and_are_bounded():
    scheduler = scheduler_of(blocks=200, max_running=2, max_waiting=100)
    paced = added(scheduler, *(sequence() for _ in range(40)))
    for now in range(20):
        for row in scheduler.schedule(64, now=float(now)):
            scheduler.complete(row)
            if row.sequence.remaining == 0:
                row.sequence.append(7)
                row.sequence.due_at = 1000.0
    assert [one in scheduler.running for one in paced] == [True] * 8 + [False] * 32


def test_a_preempted_paced_sequence_is_computed_again_up_to_its_next_token():
    scheduler = scheduler_of()
    (paced,) = added(scheduler, sequence(prompt=6))
    step(scheduler)
    paced.due_at = 10.0
    scheduler.preempt(paced)
    (row,) = scheduler.schedule(64, now=9.0)
    assert (row.start + row.count, row.samples) == (6, False)
    scheduler.complete(row)
    assert scheduler.schedule(64, now=9.0) == []
    (row,) = scheduler.schedule(64, now=10.0)
    assert row.samples


def test_the_pause_lasts_until_the_first_sequence_is_due_but_is_bounded():
    scheduler = scheduler_of()
    first, second = added(scheduler, sequence(), sequence())
    step(scheduler)
    first.due_at, second.due_at = 10.0, 10.001
    assert scheduler.schedule(64, now=9.99) == []
    assert scheduler.pause_s == pytest.approx(0.012)
    assert scheduler.schedule(64, now=5.0) == []
    assert scheduler.pause_s == 0.05
    assert scheduler.schedule(64, now=11.0) != []
    assert scheduler.pause_s == 0


def test_only_a_sequence_that_every_step_leaves_out_is_stuck():
    watch = ProgressWatch(10.0)
    served, passed_by = sequence(), sequence()
    for now in range(100, 111):
        assert watch.observe([served, passed_by], {served}, float(now)) is None
    assert watch.observe([served, passed_by], {served}, 111.0) is passed_by


def test_a_step_that_serves_a_sequence_or_in_which_it_is_not_due_resets_its_count():
    watch = ProgressWatch(10.0)
    one = sequence()
    for now, (due, served) in zip(
        range(0, 1000, 9), [([one], ()), ([one], [one]), ([one], ()), ([], ())] * 20, strict=False
    ):
        assert watch.observe(due, set(served), float(now)) is None


def test_decoding_sequences_and_the_oldest_are_due_and_an_isolated_one_is_due_alone():
    scheduler = scheduler_of(blocks=60, step_tokens=4)
    oldest, decoding, prompt = added(scheduler, sequence(1), sequence(1), sequence(30))
    step(scheduler)
    assert scheduler.due == [oldest, decoding]
    scheduler.remove(oldest)
    scheduler.remove(decoding)
    step(scheduler)
    assert scheduler.due == [prompt]
    (alone,) = added(scheduler, sequence(9, alone=True))
    step(scheduler)
    assert scheduler.due == [alone]
