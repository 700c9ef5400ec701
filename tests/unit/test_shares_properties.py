"""For any requests: all end, clients are served by weight, and one client alone is served first come, first served."""

from collections import Counter
from itertools import count
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from headrace_predictor.engine.state import shares
from headrace_predictor.engine.state.sequence import precedence
from tests.unit.test_shares import added, scheduler_of, sequence_of, step

SLOTS = 4
QUANTUM = 64
LONGEST = 60
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 10), st.integers(0, 9)),
    min_size=1,
    max_size=30,
)


@given(SEQUENCES, st.integers(10, 60), st.integers(4, 32), st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10)))
def test_every_sequence_ends_and_those_that_decode_miss_no_two_steps(arrivals, blocks, step_tokens, weights):
    scheduler = scheduler_of(blocks, SLOTS, step_tokens=step_tokens)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    steps = 0
    before: list = []
    alone_ones = set()
    while arrivals or scheduler.sequences:
        while arrivals and arrivals[0][0] <= steps:
            _, client, prompt, more, alone = arrivals.pop(0)
            weight = weights.get(client, 1.0)
            added(scheduler, 1, client, prompt=prompt, max_tokens=more, weight=weight, alone=alone == 0)
        alone_ones.update(one for one in scheduler.sequences if one.alone)
        decoding = [one for one in scheduler.running if one.remaining == 1]
        served = step(scheduler, 16)
        assert served or not (scheduler.running or scheduler.waiting)
        assert len(scheduler.running) <= SLOTS
        passed_by = [one for one in decoding if one not in served and one in scheduler.running]
        isolated = len(served) == 1 and next(iter(served)) in alone_ones
        if not isolated:
            assert not set(passed_by) & set(before)
            before = passed_by
        steps += 1
        assert steps < 3000
    assert scheduler.blocks.free == scheduler.blocks.total
    assert not scheduler._shares._accounts
    assert not scheduler._shares._debts


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=5, max_size=5),
    st.sampled_from([1.0, 2.0, 5.0]),
)
def test_backlogged_clients_are_served_by_weight(requests, weight):
    scheduler = scheduler_of(max_running=SLOTS, step_tokens=32)
    for prompt, more in 12 * requests:
        added(scheduler, 1, "a", prompt=prompt, max_tokens=more)
        added(scheduler, 1, "b", prompt=2 * prompt, max_tokens=more, weight=weight)
    counts: Counter[str] = Counter()
    with patch.object(shares, "_QUANTUM", QUANTUM):
        while {one.client for one in scheduler.waiting} == set("ab"):
            for one, number in step(scheduler, 16).items():
                counts[one.client] += number
            # Sequences that have a slot run to their end, unless the other client has fewer than its share.
            assert abs(counts["a"] - counts["b"] / weight) <= QUANTUM + SLOTS * LONGEST


@given(SEQUENCES, st.integers(10, 60), st.integers(4, 32))
def test_the_request_of_highest_priority_of_a_client_starts_first(arrivals, blocks, step_tokens):
    scheduler = scheduler_of(blocks, SLOTS, step_tokens=step_tokens)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    for steps in count():
        while arrivals and arrivals[0][0] <= steps:
            _, client, prompt, more, priority = arrivals.pop(0)
            added(scheduler, 1, client, prompt=prompt, max_tokens=more, priority=priority)
        if not (arrivals or scheduler.sequences):
            break
        waited = list(scheduler.waiting)
        served = step(scheduler, 16)
        still = [one for one in waited if one in scheduler.waiting and one not in served]
        for started in (one for one in waited if one in served):
            mine = [one for one in still if one.client == started.client]
            assert all(precedence(started) < precedence(one) for one in mine)
        assert steps < 3000


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.integers(-9, 9)), min_size=2, max_size=40),
    st.fixed_dictionaries(dict.fromkeys("abc", st.integers(1, 10))),
    st.sampled_from("abc"),
)
def test_the_priorities_of_one_client_change_nothing_for_another(arrivals, prompts, client):
    """While its requests are alike, each client gets the same in each step, in whatever order they run."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])

    def served(with_priorities):
        scheduler = scheduler_of(max_running=SLOTS, step_tokens=16)
        left, each_step = list(arrivals), []
        while left or scheduler.sequences:
            while left and left[0][0] <= len(each_step):
                _, name, priority = left.pop(0)
                own = priority if with_priorities and name == client else 0
                added(scheduler, 1, name, prompt=prompts[name], max_tokens=1, priority=own)
            tokens: Counter[str] = Counter()
            for one, number in step(scheduler, 16).items():
                tokens[one.client] += number
            each_step.append(tokens)
            assert len(each_step) < 3000
        return each_step

    assert served(True) == served(False)


@given(SEQUENCES, st.integers(10, 60), st.integers(4, 32), st.integers(1, 3))
def test_one_client_is_served_first_come_first_served(arrivals, blocks, step_tokens, before):
    """As without client names, also after it competed with another client."""
    plain, named = (scheduler_of(blocks, SLOTS, step_tokens=step_tokens) for _ in range(2))
    others = added(named, before, "other", max_tokens=2)
    while any(one in named.sequences for one in others):
        step(named)
    made: dict = {}
    for _, _, prompt, more, alone in arrivals:
        one, other = (sequence_of(name, prompt, more, alone=alone == 0) for name in ("", "named"))
        made[one] = made[other] = len(made)
        plain.add(one, 5)
        named.add(other, 5)
    while plain.sequences:
        assert [(made[one], n) for one, n in step(plain, 16).items()] == [
            (made[one], n) for one, n in step(named, 16).items()
        ]
    assert not named.sequences
