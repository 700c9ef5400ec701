"""The sampler follows its parameters, and a row's result does not depend on the other rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.errors import InvalidRequestError
from headrace.models.generation_config import GenerationRules
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.sampling.sampler import NO_TOKEN, sample, uniform
from headrace_predictor.engine.state.constraint import restrictions_of
from headrace_predictor.engine.state.sequence import SamplingRow
from tests.support.as_on_gpu import AsOnGpu


def row(output_ids=(), input_ids=(1,), end_ids=frozenset({2}), **parameters):
    sampling = SamplingParameters(**{"seed": 11, **parameters})
    restrictions = restrictions_of(sampling)
    return SamplingRow(sampling, list(input_ids), list(output_ids), end_ids, restrictions=restrictions)


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


def any_row(draw, vocabulary):
    """A row with any parameters; most of them off in most rows, as in real requests."""
    top_logprobs = draw(st.sampled_from([0, 0, 1, 20]))
    return row(
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(st.sampled_from([0.0, 1e-4, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([-1, 0, 0, 1, 5, 128, 200, 10**9])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.1, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3])),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(0, vocabulary - 1), max_size=3)),
        logit_bias=draw(st.dictionaries(st.integers(0, vocabulary - 1), st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.sampled_from([(), (), (3, 4, 5, 6, 7, 8, 9, 10)])),
        bad_token_ids=draw(st.sampled_from([(), (), ((3,), (4, 5), (0, 0, 0))])),
        logprobs=draw(st.booleans()) or top_logprobs > 0,
        top_logprobs=top_logprobs,
        input_ids=draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=5)),
        output_ids=draw(st.lists(st.integers(0, vocabulary - 1), max_size=5)),
    )


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(40, torch.float32), (5003, torch.float32), (5003, torch.float64), (1536, torch.bfloat16)]
)
@settings(max_examples=settings.default.max_examples // 4)  # Each example samples a dozen times.
@given(st.data())
def test_a_row_is_sampled_the_same_alone_and_in_a_crowd(vocabulary, dtype, data):
    size = data.draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    spread = torch.tensor([data.draw(st.sampled_from([0.1, 1.0, 5.0])) for _ in range(size)])[:, None]
    logits = (torch.randn(size, vocabulary, generator=generator) * spread).to(dtype)
    rows = [any_row(data.draw, vocabulary) for _ in range(size)]
    before = logits.clone()
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(size)]
    assert together.token_ids == [one.token_ids[0] for one in alone]
    assert together.logprobs == [one.logprobs[0] for one in alone]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocabulary", [40, 5003])
@settings(max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_on_a_gpu_rows_have_the_same_tokens_and_the_host_waits_once(vocabulary, data):
    size = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = torch.randn(size, vocabulary, generator=generator)
    rules = GenerationRules(
        suppress_tokens=(1,), min_length=4, no_repeat_ngram_size=2, exponential_decay_length_penalty=(1, 1.2)
    )
    rows = [
        any_row(data.draw, vocabulary)._replace(rules=data.draw(st.sampled_from([None, rules]))) for _ in range(size)
    ]
    masks = [0], torch.arange(vocabulary)[None] % 3 == 0
    expected = sample(logits, rows, masks)
    with AsOnGpu() as gpu:
        found = sample(logits, rows, masks)
    assert found.token_ids == expected.token_ids
    assert gpu.waits == ["tolist"]


@pytest.mark.parametrize(("vocabulary", "spread"), [(50, 4.0), (5003, 0.5)])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"top_k": 7},
        {"top_k": 3000},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"top_k": 1000, "top_p": 0.7, "temperature": 1.7},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
    ],
    ids=str,
)
def test_filters_keep_the_same_tokens_as_those_of_transformers(vocabulary, spread, parameters):
    count = 60
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    rows = [row(output_ids=[0] * n, **parameters) for n in range(count)]
    filters = LogitsProcessorList([TemperatureLogitsWarper(parameters.get("temperature", 1.0))])
    if "top_k" in parameters:
        filters.append(TopKLogitsWarper(min(parameters["top_k"], vocabulary)))
    if "top_p" in parameters:
        filters.append(TopPLogitsWarper(parameters["top_p"]))
    if "min_p" in parameters:
        filters.append(MinPLogitsWarper(parameters["min_p"]))
    cumulative = filters(None, logits.double()).softmax(-1).cumsum(-1)
    numbers = torch.tensor([[uniform(11, n)] for n in range(count)], dtype=torch.float64)
    expected = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0].tolist()
    assert sample(logits, rows).token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype):
    # There are so few values that most rows have several largest ones.
    logits = torch.randint(-3, 4, (50, 1000), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [values.index(max(values)) for values in logits.tolist()]
    assert sample(logits, [row(temperature=0)] * 50).token_ids == expected
    assert sample(logits, [row(temperature=0, logprobs=True)] * 50).token_ids == expected


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = torch.tensor([[0.1, 3.0, 0.2]])
    assert sample(logits, [row(temperature=1e-310)]).token_ids == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"temperature": 0, "repetition_penalty": 2.0},
        {"logprobs": True, "top_logprobs": 3},
    ],
    ids=str,
)
def test_nan_logits_choose_no_token_and_do_not_affect_other_rows(bad, parameters):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    good = sample(logits, [row(**parameters)] * 3)
    # Every -inf leaves no token; of the other values one is enough.
    logits[1, slice(None) if bad == -float("inf") else 4000] = bad
    sampled = sample(logits, [row(**parameters)] * 3)
    assert sampled.token_ids == [good.token_ids[0], NO_TOKEN, good.token_ids[2]]
    assert [sampled.logprobs[0], sampled.logprobs[2]] == [good.logprobs[0], good.logprobs[2]]


def test_a_row_whose_every_token_would_end_it_too_early_gets_no_token():
    logits = torch.randn(2, 3)
    early = row(temperature=0, min_tokens=1, stop_token_ids=[0, 1])
    assert sample(logits, [early, row(temperature=0)]).token_ids == [NO_TOKEN, logits[1].argmax().item()]


def test_neither_end_nor_stop_tokens_are_sampled_before_min_tokens():
    logits = torch.tensor([[0.0, 0.0, 50.0, 60.0]])

    def chosen(produced, **parameters):
        parameters_row = row(temperature=0, min_tokens=3, stop_token_ids=[3], output_ids=[0] * produced, **parameters)
        return sample(logits, [parameters_row]).token_ids[0]

    assert chosen(2) == 0
    assert chosen(3) == 3
    # An end token that is not used as one is a token like any other.
    assert chosen(2, ignore_eos=True) == 2


def test_penalties_count_their_tokens():
    logits = torch.tensor([[1.0, 1.2, 0.0]])
    assert sample(logits, [row(temperature=0, input_ids=[1])]).token_ids == [1]
    # Repetition looks at the prompt too; presence and frequency only at the output.
    assert sample(logits, [row(temperature=0, input_ids=[1], repetition_penalty=2.0)]).token_ids == [0]
    assert sample(logits, [row(temperature=0, input_ids=[1], presence_penalty=2.0)]).token_ids == [1]
    assert sample(logits, [row(temperature=0, output_ids=[1], presence_penalty=0.5)]).token_ids == [0]
    assert sample(logits, [row(temperature=0, output_ids=[1], frequency_penalty=0.15)]).token_ids == [1]
    assert sample(logits, [row(temperature=0, output_ids=[1, 1], frequency_penalty=0.15)]).token_ids == [0]


def test_a_bias_is_added_before_the_penalties():
    logits = torch.tensor([[1.0, 1.2, 0.0]])
    assert sample(logits, [row(temperature=0, logit_bias={2: 1.3})]).token_ids == [2]
    assert sample(logits, [row(temperature=0, logit_bias={1: -100, 2: 0.9})]).token_ids == [0]
    # 1.2 + 0.9 halved is 1.05; the bias after the penalty would make 1.5.
    biased = {"logit_bias": {1: 0.9, 0: 0.1}, "repetition_penalty": 2.0, "input_ids": [1]}
    assert sample(logits, [row(temperature=0, **biased)]).token_ids == [0]


def test_only_allowed_tokens_are_sampled():
    assert set(draws(torch.arange(10.0), 200, allowed_token_ids=[1, 8, 7])) <= {1, 7, 8}
    two = torch.tensor([[5.0, 1.0, 2.0]] * 2)
    assert sample(two, [row(temperature=0, allowed_token_ids=[1, 2]), row(temperature=0)]).token_ids == [2, 0]


@pytest.mark.parametrize(
    ("output_ids", "chosen"), [((), 1), ((5,), 1), ((2,), 1), ((4, 2), 0), ((4, 2, 7), 1), ((3, 3, 4, 2), 0)]
)
def test_the_last_token_of_a_bad_sequence_is_masked_after_those_before_it(output_ids, chosen):
    logits = torch.tensor([[1.0, 2.0, 0.0, 9.0]])
    bad = [[3], [4, 2, 1]]
    assert sample(logits, [row(temperature=0, bad_token_ids=bad, output_ids=output_ids)]).token_ids == [chosen]
    # The prompt is no part of the output.
    assert sample(logits, [row(temperature=0, bad_token_ids=bad, input_ids=[4, 2])]).token_ids == [1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"allowed_token_ids": [4, 5], "bad_token_ids": [[4], [3, 5]]},
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"bad_token_ids": [[token] for token in range(6)]},
    ],
)
def test_restrictions_that_could_leave_no_token_are_refused(parameters):
    restricted = row(**parameters)
    with pytest.raises(InvalidRequestError):
        restricted.restrictions.check(frozenset({2}) if "min_tokens" in parameters else frozenset(), 6)


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    sampled = sample(logits, [row(temperature=0, logprobs=True, presence_penalty=1.0), row(temperature=0)])
    assert sampled.logprobs[0].chosen == pytest.approx(logits[0].log_softmax(-1)[2].item())
    assert sampled.logprobs[0].top == []
    assert sampled.logprobs[1] is None


def test_top_logprobs_are_the_largest():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    rows = [row(temperature=0, logprobs=True, top_logprobs=n) for n in (5, 20)]
    sampled = sample(logits, rows)
    for i, n in enumerate((5, 20)):
        values, ids = logits[i].log_softmax(-1).topk(n)
        logprobs = sampled.logprobs[i]
        assert [token_id for token_id, _ in logprobs.top] == ids.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert (sampled.token_ids[i], logprobs.chosen) == logprobs.top[0]
