"""Clients that compete share the engine by weight: a light one hardly notices a heavy one."""

import pytest

from headrace.errors import OverloadedError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from tests.support.requests import submission
from tests.unit.test_scheduler import step as scheduler_step

SIZE = 4


def sequence_of(client, prompt=4, max_tokens=100, weight=1.0, alone=False, moved=False, priority=0, pace=0.0):
    sequence_of.made += 1
    ids = [1000 * sequence_of.made + i for i in range(prompt)]
    sampling = SamplingParameters(max_tokens=max_tokens, seed=1, priority=priority, pace=pace)
    name = f"{client}{sequence_of.made}"
    request = submission(name, ids, sampling, alone=alone, moved=moved, client=client, weight=weight)
    return Sequence(request, MergingSlot(sampling), frozenset())


sequence_of.made = 0


def scheduler_of(blocks=2000, max_running=8, max_waiting=400, step_tokens=64):
    return Scheduler(BlockManager(blocks + 1, SIZE), max_running, max_waiting, step_tokens)


def added(scheduler, count, client, **given):
    made = [sequence_of(client, **given) for _ in range(count)]
    for one in made:
        scheduler.add(one, 5)
    return made


def step(scheduler, prefill_tokens=64):
    """Runs a successful step; the number of ids computed for each sequence."""
    return {sequence: count for sequence, _, count in scheduler_step(scheduler, prefill_tokens)}


def running(scheduler, client):
    return [one for one in scheduler.running if one.client == client]


def test_one_stream_beside_200_has_its_prompt_in_the_next_step_and_a_token_in_every_one():
    scheduler = scheduler_of(max_running=64, step_tokens=512)
    heavy = added(scheduler, 200, "heavy", max_tokens=40)
    for _ in range(10):
        step(scheduler, 512)
    (light,) = added(scheduler, 1, "light", prompt=20, max_tokens=30)
    served = []
    while light in scheduler.sequences:
        served.append(step(scheduler, 512))
    assert served[0] == {light: 20}  # The others have no part in this step.
    assert all(light in one for one in served)
    assert all(len(one) == 64 for one in served[1:])
    assert scheduler.preempted == 1
    assert heavy[63].timeline.preemptions == 1


def test_the_priorities_of_a_client_order_its_own_requests():
    scheduler = scheduler_of(max_running=1)
    added(scheduler, 1, "a")
    step(scheduler)
    late, early = (added(scheduler, 2, "a", priority=priority) for priority in (1, -1))
    (middle,) = added(scheduler, 1, "a")
    (moved,) = added(scheduler, 1, "a", priority=9, moved=True)
    assert scheduler.waiting == [moved, *early, middle, *late]
    assert [scheduler.queue_before(sequence_of("a", priority=priority)) for priority in (-2, -1, 0, 1)] == [1, 3, 4, 6]


def test_a_client_gives_up_its_lowest_priority_request_for_another_client_of_any_priority():
    scheduler = scheduler_of(max_running=4)
    low, high = added(scheduler, 1, "a", priority=1), added(scheduler, 3, "a", priority=-1)
    step(scheduler)
    assert scheduler.running == [*high, *low]
    added(scheduler, 1, "b", priority=100)
    step(scheduler)
    assert scheduler.running[:3] == high
    assert scheduler.waiting == low


def test_a_long_prompt_has_every_other_step_to_itself():
    scheduler = scheduler_of(step_tokens=32)
    heavy = added(scheduler, 20, "heavy")
    while scheduler.streams < 8:
        step(scheduler)
    (light,) = added(scheduler, 1, "light", prompt=100)
    served = [step(scheduler, 20) for _ in range(4)]
    assert [sum(one in heavy for one in rows) for rows in served] == [0, 7, 0, 7]
    assert [rows[light] for rows in served] == [28, 20, 27, 20]


def test_the_prompts_of_a_heavy_client_delay_no_light_one():
    scheduler = scheduler_of(step_tokens=16)
    added(scheduler, 4, "heavy", prompt=400)
    step(scheduler)
    (light,) = added(scheduler, 1, "light", prompt=6)
    assert light in step(scheduler)


def test_weights_share_the_slots():
    scheduler = scheduler_of(max_running=8)
    added(scheduler, 30, "one")
    step(scheduler)
    added(scheduler, 30, "three", weight=3.0)
    for _ in range(30):
        step(scheduler)
    assert len(running(scheduler, "one")) == 2
    assert len(running(scheduler, "three")) == 6
    # No sequence is preempted and resumed again and again.
    preempted = scheduler.preempted
    for _ in range(30):
        step(scheduler)
    assert scheduler.preempted == preempted


def test_a_pace_does_not_give_a_client_more_slots():
    scheduler, tokens = scheduler_of(blocks=50_000), 0
    added(scheduler, 16, "paced", max_tokens=10_000, pace=5)
    for tick in range(2000):
        for _ in range(8 - len([one for one in scheduler.sequences if one.client == "other"])):
            added(scheduler, 1, "other", max_tokens=50)
        now = 10.0 + tick / 100
        for row in scheduler.schedule(64, now):
            scheduler.complete(row)
            if not row.samples:
                continue
            tokens += row.sequence.client == "other"
            ended = row.sequence.append(7)
            row.sequence.due_at = now + 0.2 if row.sequence.sampling.pace else 0.0
            if ended is not None:
                scheduler.remove(row.sequence)
    assert tokens > 2000 * 8 * 0.4, "with equal weights its half of the slots, less what new prompts take"


def test_a_client_that_returns_has_neither_credit_nor_less_debt():
    scheduler = scheduler_of(max_running=4)
    added(scheduler, 40, "busy", max_tokens=30)
    (idle,) = added(scheduler, 1, "idle", max_tokens=1)
    for _ in range(60):
        step(scheduler)
    assert idle not in scheduler.sequences
    added(scheduler, 20, "idle", max_tokens=30)
    counts = {"busy": 0, "idle": 0}
    for _ in range(60):
        for one, count in step(scheduler).items():
            counts[one.client] += count
    # It gets no extra steps for its absence.
    assert counts["idle"] == pytest.approx(counts["busy"], rel=0.3)


def test_a_client_that_leaves_and_returns_keeps_its_debt():
    scheduler = scheduler_of(max_running=2, step_tokens=4096)
    added(scheduler, 20, "short", max_tokens=20)
    step(scheduler)
    (long,) = added(scheduler, 1, "long", prompt=3000, max_tokens=1)
    assert step(scheduler, 4096)[long] == 3000
    assert long not in scheduler.sequences
    again, _ = added(scheduler, 2, "long", prompt=3000, max_tokens=1)
    for _ in range(20):
        assert again not in step(scheduler, 4096)


def test_blocks_are_shared_by_weight_as_slots_are():
    scheduler = scheduler_of(blocks=64, max_running=8)
    heavy = added(scheduler, 8, "heavy", prompt=20, max_tokens=80)
    for _ in range(12):
        step(scheduler)
    assert scheduler.blocks.free < 8
    (light,) = added(scheduler, 1, "light", prompt=40, max_tokens=40)
    assert light in step(scheduler)
    while light in scheduler.sequences:
        # The growing sequences of the others do not take its blocks back.
        assert light in step(scheduler)
    assert light.timeline.preemptions == 0
    while scheduler.sequences:
        step(scheduler)
    assert all(len(one.output_ids) == 80 for one in heavy)
    assert scheduler.blocks.free == scheduler.blocks.total


def test_no_sequence_is_preempted_for_a_client_beyond_its_share():
    scheduler = scheduler_of(blocks=64, max_running=8)
    added(scheduler, 4, "heavy", prompt=40, max_tokens=20)
    while scheduler.streams < 4:
        step(scheduler)
    # The client would have more than its share.
    (light,) = added(scheduler, 1, "light", prompt=200, max_tokens=40)
    assert light not in step(scheduler)
    assert scheduler.preempted == 0


def test_an_isolated_sequence_of_a_light_client_gets_a_slot():
    scheduler = scheduler_of()
    added(scheduler, 20, "heavy")
    for _ in range(3):
        step(scheduler)
    (light,) = added(scheduler, 1, "light", alone=True)
    step(scheduler)
    assert step(scheduler) == {light: 4}


def test_the_client_with_the_most_requests_in_a_full_queue_loses_one():
    scheduler = scheduler_of(max_running=2, max_waiting=4)
    heavy = added(scheduler, 2, "heavy")
    step(scheduler)
    heavy += added(scheduler, 4, "heavy")
    with pytest.raises(OverloadedError):
        added(scheduler, 1, "heavy")
    first, second = added(scheduler, 2, "light")
    assert scheduler.crowded_out == [heavy[5], heavy[4]]
    assert scheduler.waiting == [heavy[2], heavy[3], first, second]
    assert set(scheduler.sequences) == {*heavy, first, second}
    # Both have two requests in the queue.
    for client in "heavy", "light":
        with pytest.raises(OverloadedError):
            added(scheduler, 1, client)
    for one in list(scheduler.crowded_out):
        scheduler.remove(one)
    assert heavy[5] not in scheduler.sequences


def test_begun_and_resumed_requests_are_not_removed_from_the_queue():
    scheduler = scheduler_of(max_running=1, max_waiting=2)
    added(scheduler, 1, "heavy")
    step(scheduler)
    added(scheduler, 2, "heavy", moved=True)
    with pytest.raises(OverloadedError):
        added(scheduler, 1, "light")


def test_a_light_client_waits_only_behind_its_own_queue():
    scheduler = scheduler_of(max_running=2)
    added(scheduler, 2, "heavy")
    step(scheduler)
    added(scheduler, 20, "heavy")
    assert scheduler.queue_before(sequence_of("heavy")) == 20
    assert scheduler.queue_before(sequence_of("light")) == 0
    added(scheduler, 1, "light")
    assert scheduler.queue_before(sequence_of("light")) == 2
    assert scheduler.queue_before(sequence_of("heavy")) == 21
