"""The scheduler admits in order, within its limits, and gets everything back."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import InvalidRequestError, OverloadedError
from millrace.sampling import SamplingParameters
from services.predictor.engine.interface import GenerationRequest
from services.predictor.engine.scheduler import Scheduler
from services.predictor.engine.sequence import Sequence
from services.predictor.engine.slot import MergingSlot


def sequence(prompt_tokens=4, max_tokens=4):
    async def make():
        sampling = SamplingParameters(max_tokens=max_tokens, seed=1)
        return Sequence(GenerationRequest("x", [1] * prompt_tokens, sampling), MergingSlot(sampling), frozenset())

    return asyncio.run(make())


def test_first_come_first_served():
    scheduler = Scheduler(max_running=2, max_waiting=8, cache_tokens=100)
    first, second, third = (sequence() for _ in range(3))
    for one in (first, second, third):
        scheduler.add(one, 0)
    assert scheduler.admit() == [first, second]
    scheduler.remove(first)
    assert scheduler.admit() == [third]


def test_a_large_sequence_is_not_overtaken_by_small_ones():
    scheduler = Scheduler(max_running=8, max_waiting=8, cache_tokens=20)
    running, large, small = sequence(6, 6), sequence(8, 8), sequence(1, 1)
    for one in (running, large, small):
        scheduler.add(one, 0)
    assert scheduler.admit() == [running]
    scheduler.remove(running)
    assert scheduler.admit() == [large, small]


def test_what_can_never_fit_is_refused_at_once():
    with pytest.raises(InvalidRequestError, match="need 30 tokens, the cache holds 20"):
        Scheduler(2, 8, cache_tokens=20).add(sequence(20, 10), 0)


def test_a_full_queue_says_when_to_come_back():
    scheduler = Scheduler(max_running=1, max_waiting=1, cache_tokens=100)
    scheduler.add(sequence(), 0)
    scheduler.admit()
    scheduler.add(sequence(), 0)
    with pytest.raises(OverloadedError) as raised:
        scheduler.add(sequence(), 250)
    assert raised.value.retry_after_ms == 250


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), max_size=40))
def test_whatever_happens_every_token_comes_back(steps):
    scheduler = Scheduler(max_running=3, max_waiting=5, cache_tokens=24)
    for prompt_tokens, max_tokens, remove_one in steps:
        try:
            scheduler.add(sequence(prompt_tokens, max_tokens), 0)
        except OverloadedError:
            assert len(scheduler.waiting) >= 5
        scheduler.admit()
        assert len(scheduler.running) <= 3
        assert scheduler.free_tokens == 24 - sum(one.reserved_tokens for one in scheduler.running) >= 0
        if remove_one and scheduler.sequences:
            scheduler.remove(scheduler.sequences[-1])
    while scheduler.sequences:
        scheduler.admit()
        scheduler.remove(scheduler.sequences[0])
    assert scheduler.free_tokens == 24
