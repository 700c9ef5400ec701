"""The sampler chooses what its parameters say, and the same whatever stands around it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.sampling import SamplingParameters
from services.predictor.engine.sampler import SamplingRow, sample, uniform


def row(output_ids=(), input_ids=(1,), end_ids=frozenset({2}), **parameters):
    return SamplingRow(SamplingParameters(**{"seed": 11, **parameters}), list(input_ids), list(output_ids), end_ids)


def draws(logits, count, **parameters):
    """Samples at `count` output positions."""
    rows = [row(output_ids=[0] * n, **parameters) for n in range(count)]
    return sample(logits.expand(count, -1), rows).token_ids


def test_uniform_numbers_are_a_pure_function_of_seed_and_position():
    assert uniform(5, 3) == uniform(5, 3)
    assert len({uniform(seed, n) for seed in range(50) for n in range(50)}) == 2500


def test_uniform_numbers_are_spread_evenly():
    numbers = [uniform(seed, n) for seed in range(40) for n in range(250)]
    assert all(0 <= number < 1 for number in numbers)
    for tenth in range(10):
        share = sum(tenth / 10 <= number < (tenth + 1) / 10 for number in numbers) / len(numbers)
        assert math.isclose(share, 0.1, abs_tol=0.015)


def test_frequencies_follow_the_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05]))
    chosen = draws(logits, 5_000)
    shares = [chosen.count(token) / len(chosen) for token in range(5)]
    assert shares == pytest.approx([0.5, 0.3, 0.0, 0.15, 0.05], abs=0.03)
    assert shares[2] == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(2, 12), st.data())
def test_a_row_is_sampled_the_same_alone_and_in_a_crowd(seed, size, data):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(size, 40, generator=generator)
    rows = [
        row(
            seed=seed + i,
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
            top_k=data.draw(st.sampled_from([-1, 0, 1, 5, 100])),
            top_p=data.draw(st.sampled_from([0.1, 0.9, 1.0])),
            min_p=data.draw(st.sampled_from([0.0, 0.2])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
            output_ids=data.draw(st.lists(st.integers(0, 39), max_size=5)),
        )
        for i in range(size)
    ]
    together = sample(logits, rows).token_ids
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(size)]
    assert together == alone


def test_greedy_takes_the_likeliest_whatever_the_seed():
    logits = torch.tensor([[0.1, 3.0, 0.2]])
    assert {sample(logits, [row(temperature=0, seed=seed)]).token_ids[0] for seed in range(20)} == {1}


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = torch.tensor([[0.1, 3.0, 0.2]])
    assert sample(logits, [row(temperature=1e-310)]).token_ids == [1]


def test_logits_that_are_no_numbers_choose_no_token():
    with pytest.raises(ArithmeticError):
        sample(torch.tensor([[float("nan"), 1.0]]), [row(temperature=1.0)])


def test_top_k_keeps_k():
    assert set(draws(torch.arange(10.0), 500, top_k=3)) == {7, 8, 9}


def test_top_p_keeps_the_smallest_set_with_that_probability():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert set(draws(logits, 500, top_p=0.75)) == {0, 1}
    assert set(draws(logits, 500, top_p=0.05)) == {0}


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.log(torch.tensor([0.6, 0.25, 0.1, 0.05]))
    assert set(draws(logits, 500, min_p=0.4)) == {0, 1}


def test_end_cannot_be_sampled_before_min_tokens():
    logits = torch.tensor([[0.0, 0.0, 50.0]])
    assert sample(logits, [row(temperature=0, min_tokens=3, output_ids=[0, 0])]).token_ids != [2]
    assert sample(logits, [row(temperature=0, min_tokens=3, output_ids=[0, 0, 0])]).token_ids == [2]


def test_penalties_count_what_they_say():
    logits = torch.tensor([[1.0, 1.2, 0.0]])
    assert sample(logits, [row(temperature=0, input_ids=[1])]).token_ids == [1]
    # Repetition looks at the prompt too; presence and frequency only at the output.
    assert sample(logits, [row(temperature=0, input_ids=[1], repetition_penalty=2.0)]).token_ids == [0]
    assert sample(logits, [row(temperature=0, input_ids=[1], presence_penalty=2.0)]).token_ids == [1]
    assert sample(logits, [row(temperature=0, output_ids=[1], presence_penalty=0.5)]).token_ids == [0]
    assert sample(logits, [row(temperature=0, output_ids=[1], frequency_penalty=0.15)]).token_ids == [1]
    assert sample(logits, [row(temperature=0, output_ids=[1, 1], frequency_penalty=0.15)]).token_ids == [0]


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    sampled = sample(logits, [row(temperature=0, logprobs=True), row(temperature=0)])
    assert sampled.logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[2].item())
    assert sampled.logprobs[1] is None
