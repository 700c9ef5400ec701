"""A generation that would end too late at the present speed of answers is refused at once; no other one is."""

from itertools import pairwise

import pytest

from headrace.clients import ANYONE, Client, Policy
from headrace_transformer.generation.admission import LoadEstimate, RefusalPace

NOW = 1000.0
HEAVY, LIGHT = Client("heavy", Policy()), Client("light", Policy())


def loaded(answering, token_s, lengths=(), first_token_s=0.0, client=ANYONE):
    """An estimate after `answering` answers whose tokens took `token_s` each in the last second, up to `NOW`."""
    load = LoadEstimate()
    for length in lengths:
        load.began()
        load.ended(length)
    for _ in range(answering):
        load.began(client)
        load.first_token(first_token_s, client)
    tokens = max(200, answering)
    for number in range(tokens):
        load.more_tokens(1, token_s, NOW - 1 + (number + 1) / tokens)
    return load


def end_all(load):
    while load.in_flight:
        load.answer_ended()
        load.ended(None)


def taken(load, left_s, tokens, most=2000, client=ANYONE):
    """How many more requests are admitted before one is refused."""
    count = 0
    while count < most and load.retry_after_s(left_s, tokens, NOW, client) is None:
        load.began(client)
        count += 1
    return count


def queued(first_token_s=4.0, heavy=HEAVY):
    """200 requests of a heavy client, of which 32 are answered."""
    load = loaded(answering=32, token_s=0.02, first_token_s=first_token_s, client=heavy)
    for _ in range(168):
        load.began(heavy)
    return load


def test_a_request_that_would_end_too_late_is_refused_with_a_retry_delay():
    load = loaded(answering=300, token_s=0.12)
    assert 0.1 <= load.retry_after_s(5.0, 64, NOW) <= 10.0
    assert load.retry_after_s(60.0, 64, NOW) is None


def test_a_short_answer_is_admitted_where_a_long_one_would_be_late():
    load = loaded(answering=200, token_s=0.06)
    assert load.retry_after_s(5.0, 64, NOW) is not None
    assert load.retry_after_s(5.0, 16, NOW) is None


def test_a_burst_is_admitted_while_answers_are_fast():
    load = loaded(answering=5, token_s=0.005)
    assert taken(load, left_s=5.0, tokens=64) >= 200


def test_a_crowd_that_was_late_is_not_admitted_again_and_the_machine_does_not_stay_idle():
    load = loaded(answering=384, token_s=0.125)
    end_all(load)
    assert 20 < taken(load, left_s=5.0, tokens=64) < 200


def test_without_running_answers_or_measurements_no_request_is_refused():
    idle = loaded(answering=384, token_s=0.125)
    end_all(idle)
    assert idle.retry_after_s(0.1, 64, NOW) is None
    unknown = LoadEstimate()
    for _ in range(500):
        assert unknown.retry_after_s(0.1, 64, NOW) is None
        unknown.began()


def test_past_slowness_is_forgotten():
    load = loaded(answering=300, token_s=0.12)
    assert load.retry_after_s(5.0, 64, NOW) is not None
    assert load.retry_after_s(5.0, 64, NOW + 5) is None


def test_the_estimate_uses_the_usual_length_of_answers_and_not_their_maximum():
    load = loaded(answering=50, token_s=0.05, lengths=[20] * 60)
    assert load.retry_after_s(5.0, 1000, NOW) is None
    assert loaded(answering=50, token_s=0.05, lengths=[1000] * 60).retry_after_s(5.0, 1000, NOW) is not None


def test_the_wait_for_a_first_token_counts():
    slow = loaded(answering=60, token_s=0.02, first_token_s=30.0)
    assert slow.retry_after_s(5.0, 16, NOW) is not None
    assert loaded(answering=60, token_s=0.02).retry_after_s(5.0, 16, NOW) is None


def test_no_request_is_refused_for_the_queue_of_another_client():
    load = queued()
    assert load.retry_after_s(5.0, 32, NOW, HEAVY) is not None
    assert load.retry_after_s(5.0, 32, NOW, LIGHT) is None
    load.began(LIGHT)
    load.first_token(0.05, LIGHT)
    assert load.retry_after_s(5.0, 32, NOW, LIGHT) is None
    # Its own queue counts, though it answers quickly so far.
    assert 20 < taken(load, left_s=5.0, tokens=32, client=LIGHT) < 200


def test_the_queue_of_a_heavier_weight_counts_by_weight():
    load = queued(first_token_s=0.0)
    assert load.retry_after_s(4.0, 32, NOW, LIGHT) is None
    load = queued(first_token_s=0.0, heavy=Client("heavy", Policy(weight=1000)))
    assert load.retry_after_s(4.0, 32, NOW, LIGHT) is not None


def test_many_clients_with_a_request_each_are_late_together():
    load = loaded(answering=32, token_s=0.05, client=HEAVY)
    for number in range(300):
        load.began(Client(f"c{number}", Policy()))
    assert load.retry_after_s(5.0, 32, NOW, LIGHT) is not None


def test_few_absent_clients_are_remembered():
    load = LoadEstimate()
    for number in range(1000):
        client = Client(f"c{number}", Policy())
        load.began(client)
        load.ended(5, client)
    assert len(load._shares) <= 64
    load.began()
    for number in range(100):
        load.began(Client(f"c{number}", Policy()))
    assert load._shares[""].in_flight == 1
    assert load.in_flight == sum(share.in_flight for share in load._shares.values()) == 101


def test_refusals_are_immediate_up_to_dozens_a_second():
    pace = RefusalPace()
    assert [pace.hold_s(5.0, 100.0 + second) for second in range(10) for _ in range(50)] == [0.0] * 500


def test_a_storm_of_refusals_is_held_back_for_seconds_at_most_and_never_beyond_a_deadline():
    pace = RefusalPace()
    holds = [pace.hold_s(50.0, 100.0) for _ in range(1500)]
    assert holds[:60] == pytest.approx([0.0] * 60, abs=0.001)
    assert max(holds) <= 4.25
    assert max(pace.hold_s(0.2, 100.0) for _ in range(100)) <= 0.17
    # It is over as soon as they stop coming.
    assert pace.hold_s(5.0, 106.0) == 0.0


def test_callers_that_are_refused_together_get_different_retry_delays():
    pace = RefusalPace()
    holds = sorted([pace.hold_s(5.0, 100.0) for _ in range(1500)][250:])
    assert holds[0] >= 2.5
    gaps = [later - earlier for earlier, later in pairwise(holds)]
    assert max(gaps) < 0.01


def test_a_delay_leaves_out_what_a_busy_process_is_late_by():
    pace = RefusalPace()
    for _ in range(200):
        pace.held(1.0)
    assert max(pace.hold_s(5.0, 100.0) for _ in range(1500)) <= 0.85 * 3.01
    for _ in range(200):
        pace.held(0.0)
    assert max(pace.hold_s(5.0, 110.0) for _ in range(1500)) > 4.0


def test_a_pause_of_all_answers_does_not_count_as_slow_tokens():
    load = loaded(answering=16, token_s=0.02)
    resumed_at = NOW + 5.0
    for number in range(16):
        load.more_tokens(1, 5.0, resumed_at + number / 1000)
    for step in range(1, 8):
        for number in range(16):
            load.more_tokens(1, 0.02, resumed_at + 0.02 * step + number / 1000)
    assert load.retry_after_s(120.0, 140, resumed_at + 0.16) is None
    assert load.retry_after_s(5.0, 140, resumed_at + 0.16) is not None
