"""A histogram of durations whose quantiles have a relative error of 0.5 %, for any range of values.

Buckets grow by 1 %, as in DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", 2019). Only buckets with values take memory: the gaps of a stream are some hundred. Two
histograms add up exactly, so processes can send each other what they measured. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_GROWTH = 1.01
_SCALE = 1 / math.log(_GROWTH)
_LEAST = 1e-3  # Smaller values count as this: a microsecond, where the unit is a millisecond.


@dataclass(slots=True)
class Histogram:
    """Counts of values by bucket; the least, the greatest and the sum are exact."""

    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = 0.0

    def record(self, value: float) -> None:
        bucket = math.ceil(math.log(value if value > _LEAST else _LEAST) * _SCALE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value

    def add(self, other: Histogram) -> None:
        """Adds the other's values."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.greatest = max(self.greatest, other.greatest)

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of the values do not exceed (nearest rank); None without values."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        if rank == self.count:
            return self.greatest
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                middle = 2 * _GROWTH**bucket / (1 + _GROWTH)
                return min(max(middle, self.least), self.greatest)
        return self.greatest

    def quantiles(self, shares: Iterable[float]) -> dict[str, float]:
        """Quantiles by name, such as {"p50": …}; empty without values."""
        values = {f"p{100 * share:g}": self.quantile(share) for share in shares}
        return {name: value for name, value in values.items() if value is not None}

    def to_message(self) -> dict[str, Any]:
        """As values that msgpack and JSON carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Histogram:
        buckets = {int(bucket): count for bucket, count in message["buckets"].items()}  # JSON's keys are texts.
        return cls(**{**message, "buckets": buckets})
