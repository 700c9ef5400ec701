"""Prompts beside streams keep the gap between two tokens within the target, and never starve."""

import sys
from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace_predictor.engine.load import PrefillPace

TARGET_S = 0.06


@dataclass
class Machine:
    """Steps as they are: a prompt token costs more the further back its prompt began, and so does its chunk."""

    fixed: float = 0.005
    per_stream: float = 0.0001
    per_token: float = 0.0001
    per_position: float = 3e-7
    read: float = 12

    def seconds(self, streams, tokens=0, start=0):
        attended = (tokens + self.read) * (start + tokens / 2) if tokens else 0
        prompt = tokens * self.per_token + attended * self.per_position
        return self.fixed + streams * self.per_stream + prompt

    def observe(self, pace, streams, tokens=0, start=0):
        seconds = self.seconds(streams, tokens, start)
        pace.observe(streams, [(start, tokens)] if tokens else [], seconds)
        return seconds

    def run_prompt(self, pace, length, streams, prompts=1):
        """Computes a prompt beside streams; returns the duration of each step."""
        start, steps = 0, []
        while start < length:
            tokens = min(pace.limit(streams, long_prompts(prompts, start)), length - start)
            assert tokens > 0
            steps.append(self.observe(pace, streams, tokens, start))
            start += tokens
        return steps


def long_prompts(count, position=0):
    """The first one is computed up to a position."""
    return [(position, 10**6), *[(0, 10**6)] * (count - 1)]


def used(machine, target_s=TARGET_S, streams=(1, 4, 16, 16, 16)):
    """A pace that has seen steps of streams, and prompts with and without them."""
    pace = PrefillPace(target_s)
    for count in streams:
        machine.observe(pace, count)
    machine.observe(pace, 0, 256)
    machine.run_prompt(pace, 1000, max(streams))
    return pace


MACHINES = st.builds(
    Machine,
    fixed=st.floats(1e-4, 0.05),
    per_stream=st.floats(1e-6, 0.001),
    per_token=st.floats(1e-6, 0.002),
    per_position=st.floats(0, 3e-6),
)


@given(machine=MACHINES, target_s=st.floats(0.02, 0.5), streams=st.integers(1, 64))
def test_steps_beside_streams_take_no_longer_than_the_target(machine, target_s, streams):
    assume(machine.seconds(streams) < target_s / 2)
    pace = used(machine, target_s, (1, streams, streams))
    # So long that fewer tokens than the least would do.
    least = machine.seconds(streams, tokens=11, start=3000) * 1.1
    for step in machine.run_prompt(pace, 3000, streams):
        assert step <= max(1.1 * target_s, least)


def test_a_long_prompt_takes_the_whole_target():
    machine = Machine()
    steps = machine.run_prompt(used(machine), 2000, streams=16)
    assert sum(steps[:-1]) > 0.9 * TARGET_S * len(steps[:-1])


@pytest.mark.parametrize("target_s", [0.02, 0.04, 0.1, 0.2])
def test_a_higher_target_brings_the_first_token_earlier(target_s):
    machine = Machine()
    lower, higher = (used(machine, target) for target in (target_s, 2 * target_s))
    assert sum(machine.run_prompt(higher, 2000, 16)) < sum(machine.run_prompt(lower, 2000, 16))


@pytest.mark.parametrize("streams", [2, 16, 32])
def test_prompts_progress_even_if_streams_alone_take_longer_than_the_target(streams):
    machine = Machine(fixed=2 * TARGET_S)
    steps = machine.run_prompt(used(machine), 2000, streams)
    alone = machine.seconds(streams)
    for step in steps[:-1]:
        assert 1.6 * alone < step < 1.9 * alone


def test_one_stream_does_not_delay_many_prompts():
    machine = Machine()
    pace = used(machine)
    alone = machine.seconds(1)
    longest = machine.seconds(1, pace.limit(1, long_prompts(31)))
    assert longest == pytest.approx(32 * alone, rel=0.1)
    # Nor do hundreds of them stop it.
    assert pace.limit(1, long_prompts(255)) == pace.limit(1, long_prompts(32))


@pytest.mark.parametrize("fixed", [0.02, 0.1, 0.5])
def test_many_prompts_beside_as_many_streams_add_up_to_a_quarter_of_a_second_or_four_steps(fixed):
    machine = Machine(fixed=fixed)
    added = machine.seconds(16, used(machine).limit(16, long_prompts(16))) - machine.seconds(16)
    assert added == pytest.approx(max(0.25, 4 * machine.seconds(16)), rel=0.1)


def test_short_prompts_cost_no_more_than_measured_although_their_growth_is_noise():
    machine, pace = Machine(fixed=0.04, per_token=0.0025), PrefillPace(TARGET_S)
    machine.observe(pace, 16)
    for length, noise in ((33, 1.1), (31, 0.9)) * 3:
        chunks = [(0, length)] * 4
        pace.observe(16, chunks, machine.seconds(16) + noise * 4 * length * machine.per_token)
    added = pace.limit(16, [(0, 32)] * 32) * machine.per_token
    assert added == pytest.approx(0.25, rel=0.15)


def test_prompts_that_fit_are_computed_whole():
    machine = Machine()
    assert used(machine).limit(4, [(0, 10), (90, 7)]) >= 17


def test_a_slower_machine_makes_steps_smaller_within_a_few():
    machine = Machine()
    pace = used(machine)
    machine.per_token *= 5
    machine.per_position *= 5
    steps = machine.run_prompt(pace, 1200, streams=16)
    assert max(steps[6:]) < 1.25 * TARGET_S


def test_costs_are_measured_while_the_same_streams_run():
    machine = Machine()
    pace = PrefillPace(TARGET_S)
    for _ in range(3000):
        machine.observe(pace, 16)
    steps = machine.run_prompt(pace, 3000, streams=16)
    # One step to measure a token's cost, one to measure its growth.
    assert max(steps[2:]) < 1.1 * TARGET_S
    assert steps[2] > 0.9 * TARGET_S


def test_prompts_that_come_all_at_once_to_a_new_engine_progress_before_any_step_without_prompts():
    machine, pace = Machine(), PrefillPace(TARGET_S)
    machine.observe(pace, 0, 256)
    for streams in range(1, 32):
        steps = machine.run_prompt(pace, 400, streams, prompts=32 - streams)
        assert len(steps) <= 2
        assert max(steps) < 1.25 * TARGET_S


def test_a_crowd_at_a_new_engine_need_not_wait_for_a_step_without_prompts():
    machine, pace = Machine(fixed=0.03, per_stream=0.0025, per_token=0.0025), PrefillPace(0.024)
    machine.observe(pace, 0, pace.limit(0, long_prompts(64)))
    for _ in range(2):
        machine.observe(pace, 8, pace.limit(8, long_prompts(56)))
    assert pace.limit(8, long_prompts(56)) > 64


@given(
    st.lists(
        st.tuples(
            st.integers(0, 64),
            st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 2048)), max_size=3),
            st.floats(0, 1e9),
        ).filter(lambda seen: seen[0] or seen[1])
    ),
    st.integers(0, 64),
    st.integers(1, 64),
    st.integers(0, 10**6),
)
@example([(0, [(0, 2048)], sys.float_info.min)], 0, 1, 0)
def test_prompts_progress_after_any_measurements(seen, streams, prompts, position):
    pace = PrefillPace(TARGET_S)
    for observation in seen:
        pace.observe(*observation)
    assert pace.limit(streams, long_prompts(prompts, position)) >= (4 if streams else 256)


def test_prompts_alone_get_a_quarter_of_a_second_and_no_less_than_an_ordinary_prompt_needs():
    machine = Machine()
    pace = used(machine)
    assert machine.seconds(0, pace.limit(0, long_prompts(9))) == pytest.approx(0.25, rel=0.05)
    late = pace.limit(0, long_prompts(1, 2000))
    assert machine.seconds(0, late, start=2000) == pytest.approx(0.25, rel=0.05)
    slow = Machine(fixed=0.5, per_token=0.01)
    assert PrefillPace(TARGET_S).limit(0, long_prompts(9)) == 256
    assert used(slow).limit(0, long_prompts(9)) == 256


@pytest.mark.parametrize("streams", [1, 8])
def test_chunks_with_passes_of_their_own_do_not_shrink_until_they_are_mostly_fixed_cost(streams):
    machine, pace = Machine(fixed=0.08), PrefillPace(TARGET_S, packed=False)
    machine.observe(pace, streams)
    for _ in range(20):
        tokens = pace.limit(streams, long_prompts(1))
        assert tokens >= 32
        pace.observe(streams, [(0, tokens)], machine.seconds(streams) + 0.06 + 0.002 * tokens)
