"""What is measured at one level of load, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest import figures
from loadtest.figures import PROCESSOR_FULL, Figures


@dataclass(frozen=True)
class Level:
    """What was measured with so many users; rates a second, times in milliseconds (None without such a measure)."""

    users: int
    held: bool
    requests: int
    failed: int
    good_percent: float
    goodput: float
    tokens: float
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    whole_p50: float | None
    whole_p99: float | None
    processor_full: bool


def measured(found: Figures, users: int, seconds: int, least_percent: float) -> Level:
    """The level of some seconds' figures; without a finished request it broke."""
    share = found.good_share()
    good_percent = 100 * (share or 0.0)
    times = {
        f"{measure}_{name}": value
        for measure in (figures.TTFT, figures.GAP, figures.WHOLE)
        for name, value in _pair(found, measure).items()
    }
    return Level(
        users=users,
        held=share is not None and good_percent >= least_percent,
        requests=found.count(figures.REQUESTS),
        failed=found.count(figures.FAILED),
        good_percent=good_percent,
        goodput=found.count(figures.GOOD) / seconds,
        tokens=found.count(figures.TOKENS) / seconds,
        processor_full=found.processor >= PROCESSOR_FULL,
        **times,
    )


def _pair(found: Figures, measure: str) -> dict[str, float | None]:
    histogram = found.of(measure)
    return {"p50": histogram.quantile(0.5), "p99": histogram.quantile(0.99)}
