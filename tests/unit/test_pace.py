"""Prompts beside streams take so much of a step that streams hardly notice, and no less than their share."""

import pytest

from services.predictor.engine.load.pace import PrefillPace

FIXED, PER_TOKEN = 0.005, 0.0002


def seconds(tokens, factor=1.0):
    return FIXED + PER_TOKEN * tokens * factor


@pytest.fixture
def pace():
    learned = PrefillPace()
    for streams in (1, 4, 16, 16, 16):
        learned.observe(streams, 0, seconds(streams))
    learned.observe(0, 256, seconds(256))
    return learned


def test_one_prompt_stretches_the_steps_of_many_streams_by_less_than_half(pace):
    tokens = pace.limit(streams=16, prompts=1)
    assert seconds(16) < seconds(16 + tokens) < 1.5 * seconds(16)


def test_many_prompts_are_not_held_up_by_one_stream(pace):
    assert pace.limit(streams=1, prompts=31) > 20 * pace.limit(streams=16, prompts=1) / 2
    assert seconds(1 + pace.limit(streams=1, prompts=31)) < 33 * seconds(1)


def test_it_follows_what_a_prompts_tokens_cost_as_it_grows(pace):
    before = pace.limit(16, 1)
    for _ in range(20):
        tokens = pace.limit(16, 1)
        pace.observe(16, tokens, seconds(16) + PER_TOKEN * 5 * tokens)
    assert pace.limit(16, 1) < before / 3
    for _ in range(20):
        tokens = pace.limit(16, 1)
        pace.observe(16, tokens, seconds(16) + PER_TOKEN * tokens)
    assert pace.limit(16, 1) == pytest.approx(before, rel=0.2)


def test_it_goes_on_whatever_it_has_seen():
    pace = PrefillPace()
    assert pace.limit(1, 1) > 0
    for observation in ((1, 0, 0.0), (1, 0, 5.0), (0, 1, 0.0), (3, 7, 1e-9), (1, 1, 1e9)):
        pace.observe(*observation)
        assert pace.limit(5, 5) > 0


def test_prompts_alone_get_a_quarter_of_a_second_and_no_less_than_an_ordinary_prompt_needs(pace):
    assert seconds(pace.limit(streams=0, prompts=9)) == pytest.approx(0.25, rel=0.05)
    slow = PrefillPace()
    assert slow.limit(streams=0, prompts=9) == 256
    for streams in (1, 4, 16):
        slow.observe(streams, 0, 100 * seconds(streams))
    assert slow.limit(streams=0, prompts=9) == 256
