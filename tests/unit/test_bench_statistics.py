"""The benchmark's arithmetic: quantiles, paired ratios, and the interval that a target is held against."""

from __future__ import annotations

import pytest

from bench.statistics import estimate, paired_ratios, quantile


def test_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert quantile([5.0, 1.0, 3.0], 0.99) == 5.0
    assert quantile([5.0, 1.0, 3.0], 0.0) == 1.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_quantile_refuses_empty_values_and_wrong_shares(values: list[float], share: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # either is the caller's mistake
        quantile(values, share)


def test_ratios_are_of_the_same_round() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([1.0, 2.0], [1.0])


def test_equal_rounds_have_no_spread() -> None:
    found = estimate([1.5] * 9)
    assert (found.median, found.low, found.high, found.rounds) == (1.5, 1.5, 1.5, 9)


def test_interval_contains_the_median_and_ignores_one_outlier() -> None:
    found = estimate([0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03, 50.0])
    assert found.median == 1.0
    assert 0.96 <= found.low < 1.0 < found.high <= 1.03


def test_same_rounds_give_the_same_interval() -> None:
    rounds = [0.7, 1.3, 0.9, 1.1, 1.0, 1.2, 0.8, 1.4, 0.95]
    assert estimate(rounds) == estimate(rounds)


def test_interval_reaches_a_bound_that_lies_in_it_or_before_it() -> None:
    found = estimate([0.9, 0.92, 0.94, 0.96, 0.98])
    assert found.reaches(at_least=0.95, at_most=None)
    assert not found.reaches(at_least=1.0, at_most=None)
    assert found.reaches(at_least=None, at_most=0.91)
    assert not found.reaches(at_least=None, at_most=0.5)


def test_no_rounds_have_no_estimate() -> None:
    with pytest.raises(ValueError, match="rounds"):
        estimate([])
