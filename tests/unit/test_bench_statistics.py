"""The benchmark's arithmetic: quantiles, paired ratios, and the interval that a target is held against."""

import pytest

from bench.statistics import estimate, paired_ratios, quantile


def test_quantile_is_a_value_that_was_measured() -> None:
    assert [quantile([5.0, 1.0, 3.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 5.0]
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0


@pytest.mark.parametrize(
    "ask", [lambda: quantile([], 0.5), lambda: quantile([1.0], 1.5), lambda: paired_ratios([1.0, 2.0], [1.0])]
)
def test_what_has_no_answer_is_refused(ask) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the caller's mistake
        ask()


def test_ratios_are_of_the_same_round() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_interval_contains_the_median_ignores_an_outlier_and_is_the_same_for_the_same_rounds() -> None:
    rounds = [0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03, 50.0]
    found = estimate(rounds)
    assert (found.median, found.rounds) == (1.0, 9)
    assert 0.96 <= found.low < 1.0 < found.high <= 1.03
    assert estimate(rounds) == found
    with pytest.raises(ValueError, match="rounds"):
        estimate([])


def test_interval_reaches_a_bound_that_lies_in_it_or_before_it() -> None:
    found = estimate([0.9, 0.92, 0.94, 0.96, 0.98])
    assert found.reaches(at_least=0.95, at_most=None)
    assert not found.reaches(at_least=1.0, at_most=None)
    assert found.reaches(at_least=None, at_most=0.91)
    assert not found.reaches(at_least=None, at_most=0.5)
