"""Medians, quantiles and the interval of a paired comparison. Pure.

The interval is the percentile bootstrap of the median: the paired rounds' figures are drawn with replacement 10,000
times (fixed seed), and the 2.5th and 97.5th percentile of the medians are its ends (Efron, 1979). Rounds are paired:
both figures of a ratio were measured one after another.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median over rounds with its 95 % interval."""

    median: float
    low: float
    high: float
    rounds: int

    def reaches(self, at_least: float | None, at_most: float | None) -> bool:
        """Whether any part of the interval is within the bounds."""
        return (at_least is None or self.high >= at_least) and (at_most is None or self.low <= at_most)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    if not values:
        raise ValueError("a quantile needs values")
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, not at {share}")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def estimate(values: Sequence[float]) -> Estimate:
    """The median of one figure for each round, with its bootstrap interval."""
    if not values:
        raise ValueError("an estimate needs rounds")
    draw = random.Random(0)  # noqa: S311  # The same rounds give the same interval.
    medians = [median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    outside = (1 - _CONFIDENCE) / 2
    return Estimate(median(values), quantile(medians, outside), quantile(medians, 1 - outside), len(values))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Headrace's figure divided by the peer's, round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
