"""A generation that would end too late is refused at once, by those that ended before it; no other one is."""

import pytest

from services.transformer.load_estimate import LoadEstimate, RefusalPace


def loaded(in_flight, per_s, first_token_s, ends=64):
    """So many in flight of whom so many end a second; and the time it is."""
    load = LoadEstimate()
    for _ in range(in_flight + ends):
        load.began()
    for number in range(ends):
        load.first_token(first_token_s)
        load.ended(100 + number / per_s)
    return load, 100 + ends / per_s


def test_where_the_queue_is_longer_than_the_deadline_one_is_refused_and_told_when_to_come_again():
    load, now = loaded(in_flight=350, per_s=60, first_token_s=4.0)
    retry_after_s = load.retry_after_s(5.0, now)
    assert 1.0 < retry_after_s < 5.0
    assert load.retry_after_s(20.0, now) is None


def test_a_queue_that_is_shorter_than_the_deadline_is_no_reason():
    load, now = loaded(in_flight=180, per_s=60, first_token_s=2.0)
    assert load.retry_after_s(5.0, now) is None


def test_a_burst_after_a_pause_is_taken():
    load, now = loaded(in_flight=0, per_s=60, first_token_s=4.0)
    now += 60
    for _ in range(500):
        assert load.retry_after_s(5.0, now) is None
        load.began()


def test_while_answers_begin_soon_nobody_is_refused_however_slow_they_are():
    # Four streams of two seconds each: another one with a deadline of a second has a place, if too little time.
    load, now = loaded(in_flight=4, per_s=2, first_token_s=0.05)
    assert load.retry_after_s(1.0, now) is None
    # And a burst finds the rate of a quiet time, which says nothing.
    for _ in range(200):
        load.began()
    assert load.retry_after_s(5.0, now) is None


@pytest.mark.parametrize("ends", [0, 1, 15])
def test_where_little_has_ended_nobody_is_refused(ends):
    load, now = loaded(in_flight=1000, per_s=10, first_token_s=9.0, ends=ends)
    assert load.retry_after_s(0.1, now) is None


def test_a_crowd_that_was_late_as_a_whole_is_not_taken_again():
    load, now = loaded(in_flight=0, per_s=20, first_token_s=2.0)
    for _ in range(384):
        load.began()
    for _ in range(384):
        load.ended(now + 5, in_time=False)
    taken = 0
    while load.retry_after_s(5.0, now + 5) is None:
        load.began()
        taken += 1
    assert 10 < taken < 100


def test_what_a_predictor_refused_says_nothing_of_the_rate():
    load, now = loaded(in_flight=350, per_s=60, first_token_s=4.0)
    before = load.retry_after_s(5.0, now)
    for _ in range(100):
        load.began()
        load.ended(now, in_time=False)
    assert load.retry_after_s(5.0, now) == before


def test_refusals_are_sent_at_once_until_they_come_by_the_hundred_a_second():
    pace = RefusalPace()
    assert [pace.hold_s(5.0, 100.0 + second) for second in range(10) for _ in range(50)] == [0.0] * 500


def test_a_storm_of_refusals_is_held_back_for_a_second_at_most_and_never_for_long_of_a_deadline():
    pace = RefusalPace()
    holds = [pace.hold_s(5.0, 100.0) for _ in range(1500)]
    assert holds[:100] == pytest.approx([0.0] * 100, abs=0.001)
    assert holds == sorted(holds)
    assert max(holds) == 1.0
    assert pace.hold_s(0.2, 100.0) == pytest.approx(0.05)
    # It is over as soon as they stop coming.
    assert pace.hold_s(5.0, 103.0) == 0.0
