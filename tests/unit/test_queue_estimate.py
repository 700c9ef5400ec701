"""Whether a request would be too late is estimated from recent ends, and not at all without enough of them."""

import math

import pytest

from headrace_predictor.engine.interface import sampling_of
from headrace_predictor.engine.load import QueueEstimate
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from tests.support.requests import request


def sequence(now, deadline_s=None, first_token_s=None, max_tokens=10):
    message = request(
        deadline=math.inf if deadline_s is None else now + deadline_s,
        first_token_timeout_s=first_token_s,
        max_tokens=max_tokens,
    )
    made = Sequence(message, MergingSlot(sampling_of(message)), frozenset())
    made.timeline.submitted = now
    return made


def estimate_of(ends, places=4, tokens=10, seconds=1.0):
    """An estimate after ends at these times; and the time of the last one."""
    estimate = QueueEstimate(places)
    for end in ends:
        estimate.ended(end)
        estimate.succeeded(tokens, seconds)
    return estimate, ends[-1]


EVERY_SECOND = [float(i) for i in range(100, 120)]


@pytest.mark.parametrize(
    ("ahead", "wanted", "late"),
    [
        (5, {"deadline_s": 5.0}, True),
        (5, {"deadline_s": 20.0}, False),
        (5, {"first_token_s": 5.0}, True),
        (5, {"first_token_s": 10.0}, False),
        (5, {}, False),
        # A place would be free in time, but the answer would not be complete.
        (5, {"deadline_s": 6.2}, True),
        (0, {"deadline_s": 0.01, "first_token_s": 0.01}, False),
    ],
)
def test_a_waiting_request_is_late_if_its_deadline_is_before_its_estimated_end(ahead, wanted, late):
    estimate, now = estimate_of(EVERY_SECOND)
    assert estimate.is_late(sequence(now, **wanted), ahead, now) is late


def test_a_short_request_is_not_estimated_by_long_ones():
    estimate, now = estimate_of(EVERY_SECOND, tokens=1000, seconds=100.0)
    assert estimate.is_late(sequence(now, deadline_s=30.0, max_tokens=1000), 5, now)
    assert not estimate.is_late(sequence(now, deadline_s=30.0, max_tokens=50), 5, now)


def test_tokens_that_are_produced_already_take_no_time():
    estimate, now = estimate_of(EVERY_SECOND, tokens=1000, seconds=100.0)
    moved = sequence(now, deadline_s=30.0, max_tokens=1000)
    moved.given = 950
    assert not estimate.is_late(moved, 5, now)


def test_a_request_that_would_be_late_even_if_it_began_now_is_hopeless():
    estimate, now = estimate_of(EVERY_SECOND, tokens=100, seconds=10.0)
    assert estimate.is_hopeless(sequence(now, deadline_s=10.0, max_tokens=100), now)
    assert not estimate.is_hopeless(sequence(now, deadline_s=13.0, max_tokens=100), now)
    assert not estimate.is_hopeless(sequence(now, deadline_s=2.0, max_tokens=10), now)
    assert not estimate.is_hopeless(sequence(now, max_tokens=100), now)
    estimate.idle()
    assert not estimate.is_hopeless(sequence(now, deadline_s=0.1, max_tokens=100), now)


def test_requests_that_end_together_count_as_one_round():
    # Four at once, each eight seconds.
    ends = [100.0 + 8 * (i // 4) for i in range(40)]
    for count in range(16, 40):
        estimate, now = estimate_of(ends[:count])
        # At best a place is free at once, at worst after a round of eight seconds.
        assert not estimate.is_late(sequence(now, first_token_s=12.0), 4, now)
        assert estimate.is_late(sequence(now, first_token_s=12.0), 16, now)


@pytest.mark.parametrize("ends", [[], EVERY_SECOND[:7]])
def test_after_few_ends_no_request_is_late(ends):
    estimate, _ = estimate_of([*ends, 107.0]) if ends else (QueueEstimate(4), 0)
    estimate.idle()
    for end in ends:
        estimate.ended(end)
    assert not estimate.is_late(sequence(200.0, deadline_s=0.1), 50, 200.0)


def test_ends_before_a_pause_are_not_used_after_it():
    estimate, now = estimate_of(EVERY_SECOND)
    estimate.idle()
    assert not estimate.is_late(sequence(now, deadline_s=1.0), 50, now)
    # But it is the best guess of when to come back.
    assert 800 <= estimate.retry_after_ms <= 1200


@pytest.mark.parametrize(
    ("steps", "hopeless"), [([0.1] * 10, False), ([0.3] * 10, True), ([0.3] * 10 + [0.1] * 30, False)]
)
def test_longer_steps_show_a_slower_machine_before_any_request_ends(steps, hopeless):
    estimate = QueueEstimate(4)
    for end in EVERY_SECOND:
        estimate.stepped(0.1)
        estimate.ended(end)
        estimate.succeeded(10, 1.0)
    for seconds in steps:
        estimate.stepped(seconds)
    now = EVERY_SECOND[-1]
    assert estimate.is_hopeless(sequence(now, deadline_s=2.0), now) is hopeless
