"""What was measured in some time: histograms and counts by row, and the slowest requests.

A row is a kind of call, such as "Generate"; a measure is one of `options.MEASURES` or `server ttft`, in milliseconds.
Figures of several seconds or processes add up. `Figures` is plain data: messages of msgpack or JSON carry it. Not
thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_GROWTH = 1.01
_SCALE = 1 / math.log(_GROWTH)
_LEAST = 1e-3  # Smaller values count as this: a microsecond, where the unit is a millisecond.

TTFT, GAP, WHOLE, CANCEL, SERVER_TTFT = "ttft", "gap", "whole", "cancel", "server ttft"
# Counts.
REQUESTS, GOOD, FAILED, TOKENS, MESSAGES = "requests", "good", "failed", "tokens", "messages"
# A process that runs for more of the time delays what it measures.
PROCESSOR_FULL = 0.9
_SLOWEST = 10


@dataclass(slots=True)
class Histogram:
    """Counts of values by bucket; the least and the greatest are exact.

    Quantiles have a relative error of 0.5 %, for any range of values: buckets grow by 1 %, as in DDSketch (Masson, Rim,
    Lee: "DDSketch: a fast and fully-mergeable quantile sketch with relative-error guarantees", 2019). Only buckets with
    values take memory: the gaps of a stream are some hundred. Two histograms add up exactly.
    """

    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    least: float = math.inf
    greatest: float = 0.0

    def record(self, value: float) -> None:
        bucket = math.ceil(math.log(value if value > _LEAST else _LEAST) * _SCALE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value

    def add(self, other: Histogram) -> None:
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
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


@dataclass(frozen=True)
class SlowRequest:
    """A request among the slowest; times in milliseconds."""

    row: str
    request_id: str
    trace_id: str
    whole_ms: float
    ttft_ms: float | None = None
    server_ttft_ms: float | None = None
    longest_gap_ms: float | None = None
    failure: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """By what they are compared: a stream's time to the first token, before the whole times of other calls."""
        return (self.ttft_ms is not None, self.whole_ms if self.ttft_ms is None else self.ttft_ms)


class Figures:
    """`processor`: the greatest share of the time in which a process of the load test ran or was ready to, 0 to 1."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.slowest: list[SlowRequest] = []
        self.processor = 0.0

    def record(self, row: str, measure: str, milliseconds: float) -> None:
        histogram = self.histograms.get((row, measure))
        if histogram is None:
            histogram = self.histograms[row, measure] = Histogram()
        histogram.record(milliseconds)

    def note_slow(self, request: SlowRequest) -> None:
        """Keeps it if it is among the slowest."""
        if len(self.slowest) < _SLOWEST or request.order > self.slowest[-1].order:
            self.slowest = _slowest([*self.slowest, request])

    def add(self, other: Figures) -> None:
        for key, histogram in other.histograms.items():
            self.histograms.setdefault(key, Histogram()).add(histogram)
        self.counts.update(other.counts)
        self.slowest = _slowest([*self.slowest, *other.slowest])
        self.processor = max(self.processor, other.processor)

    @property
    def rows(self) -> list[str]:
        return sorted({row for row, _ in (*self.histograms, *self.counts)})

    def of(self, measure: str, row: str | None = None) -> Histogram:
        """The histogram of a measure of a row, or over all."""
        total = Histogram()
        for (own, name), histogram in self.histograms.items():
            if name == measure and row in (None, own):
                total.add(histogram)
        return total

    def count(self, what: str, row: str | None = None) -> int:
        return sum(number for (own, name), number in self.counts.items() if name == what and row in (None, own))

    def good_percent(self, row: str | None = None) -> float | None:
        """The percentage of requests that met the objective; None without requests."""
        requests = self.count(REQUESTS, row)
        return 100 * self.count(GOOD, row) / requests if requests else None

    def rates(self, seconds: int, row: str | None = None) -> dict[str, float | None]:
        """Counts a second of a row or over all, and the percentage of good requests, by the names of charts."""
        counts = {"requests": REQUESTS, "failed": FAILED, "goodput": GOOD, "tokens": TOKENS, "messages": MESSAGES}
        rates = {name: self.count(what, row) / seconds for name, what in counts.items()}
        return {**rates, "good_percent": self.good_percent(row)}

    def to_message(self) -> dict[str, Any]:
        return {
            "histograms": [(key, value.to_message()) for key, value in self.histograms.items()],
            "counts": list(self.counts.items()),
            "slowest": [asdict(request) for request in self.slowest],
            "processor": self.processor,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Figures:
        figures = cls()
        figures.histograms = {tuple(key): Histogram.from_message(value) for key, value in message["histograms"]}
        figures.counts.update({tuple(key): count for key, count in message["counts"]})
        figures.slowest = [SlowRequest(**request) for request in message["slowest"]]
        figures.processor = message["processor"]
        return figures


def _slowest(requests: list[SlowRequest]) -> list[SlowRequest]:
    return sorted(requests, key=lambda request: request.order, reverse=True)[:_SLOWEST]


def verdicts(total: Figures, least_percent: float) -> dict[str, tuple[bool, str]]:
    """Of `--check`: row → whether enough of its requests were good, and the figures in words."""
    result = {}
    for row in total.rows:
        requests = total.count(REQUESTS, row)
        percent = total.good_percent(row) or 0.0
        words = [f"{percent:.1f} % of {requests} requests good, {total.count(FAILED, row)} failed"]
        for measure in (TTFT, GAP, WHOLE, CANCEL):
            quantiles = total.of(measure, row).quantiles((0.5, 0.99))
            if quantiles:
                words.append(f"{measure} p50 {quantiles['p50']:.1f} ms, p99 {quantiles['p99']:.1f} ms")
        result[row] = (requests > 0 and percent >= least_percent, "; ".join(words))
    return result
