"""Searches by blocks equal searches over every token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_predictor.engine.sampling.vocabulary import argmax, invert, largest, maximum, ordered, softmax

SIZES = st.sampled_from([1, 2, 127, 128, 129, 640, 1536, 5003])


def values_of(size, levels, seed):
    """Three rows of random values; few levels mean many equal ones."""
    return torch.randint(0, levels, (3, size), generator=torch.Generator().manual_seed(seed)).float()


@given(SIZES, st.sampled_from([1, 3, 10**6]), st.integers(0, 1000))
def test_argmax_is_the_first_of_the_largest(size, levels, seed):
    values = values_of(size, levels, seed)
    expected = [row.index(max(row)) for row in values.tolist()]
    assert argmax(values).tolist() == expected


@given(SIZES, st.sampled_from([1, 3, 10**6]), st.integers(0, 1000), st.sampled_from([1, 20, 128, 1024]))
def test_the_largest_are_the_first_of_a_sort(size, levels, seed, count):
    values, count = values_of(size, levels, seed), min(count, size)
    found, ids = largest(values, count)
    assert torch.equal(found, ordered(values)[:, :count])
    assert torch.equal(values.gather(1, ids), found)
    assert all(len(set(row)) == count for row in ids.tolist())


@given(SIZES, st.integers(0, 1000))
def test_softmax_is_that_of_float64_and_of_each_row_alone(size, seed):
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * 30
    values[1, size // 2] = -torch.inf if size > 1 else 0.0
    highest, divisors = maximum(values)[:, None], torch.tensor([[1.0], [0.01], [2.0]])
    found = softmax(values, highest, divisors)
    assert torch.allclose(found.double(), (values.double() / divisors.double()).softmax(-1), atol=1e-6, rtol=1e-4)
    alone = [softmax(values[i : i + 1], highest[i : i + 1], divisors[i : i + 1]) for i in range(3)]
    assert torch.equal(found, torch.cat(alone))


@given(SIZES, st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.booleans())
def test_invert_finds_where_the_sum_reaches_the_number(size, seed, number, sparse):
    # Whole numbers, whose sums are exact in any order.
    weights = values_of(size, 2 if sparse else 1000, seed)
    weights[:, size // 2] += 1
    numbers = torch.full((3,), number, dtype=torch.float64)
    cumulative = weights.double().cumsum(-1)
    expected = (cumulative <= numbers[:, None] * cumulative[:, -1:]).sum(-1)
    assert invert(weights, numbers).tolist() == expected.tolist()


@pytest.mark.parametrize("size", [100, 128, 1000, 1024])
def test_invert_never_chooses_a_token_without_weight(size):
    weights = torch.zeros(2, size)
    weights[0, 3], weights[1, size - 2] = 0.1, 1e-30
    for number in (0.0, 0.5, 1 - 2**-53):
        assert invert(weights, torch.full((2,), number, dtype=torch.float64)).tolist() == [3, size - 2]


def test_nan_rows_give_some_id():
    values = torch.full((2, 5003), float("nan"))
    assert all(0 <= token_id < 5003 for token_id in argmax(values).tolist())
    assert all(0 <= token_id < 5003 for token_id in invert(values, torch.zeros(2, dtype=torch.float64)).tolist())
