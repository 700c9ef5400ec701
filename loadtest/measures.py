"""The figures of a load test by second: recorded in each process, added up where the page is.

A worker hands its finished seconds to Locust's report to the master (`drain`), which takes them in (`absorb`). Without
workers one process does both. Seconds are those of the clock, so that processes agree about them; their clocks must.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.figures import Figures

KEPT_S = 900


class Measures:
    """`now`: the clock, in seconds since the epoch."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.reset()

    def reset(self) -> None:
        self._second = 0
        self._current = Figures()
        self._seconds: dict[int, Figures] = {}
        self._total = Figures()

    def current(self) -> Figures:
        """The figures of this second, to record into."""
        second = int(self._now())
        if second != self._second:
            if self._second:
                self._add(self._second, self._current)
            self._second, self._current = second, Figures()
        return self._current

    def drain(self) -> list[list[Any]]:
        """The finished seconds as [second, message], which are forgotten here."""
        self.current()
        messages = [[second, figures.to_message()] for second, figures in self._seconds.items()]
        self._seconds.clear()
        return messages

    def absorb(self, messages: list[list[Any]]) -> None:
        """Takes in what another process drained."""
        for second, message in messages:
            self._add(second, Figures.from_message(message))

    def window(self, since: int, until: int) -> Figures:
        """The finished seconds from `since` to before `until`."""
        self.current()
        figures = Figures()
        for second in range(since, until):
            if second in self._seconds:
                figures.add(self._seconds[second])
        return figures

    def latest(self, seconds: int, delay: int = 0) -> Figures:
        """The last finished seconds, up to `delay` seconds ago."""
        until = int(self._now()) - delay
        return self.window(until - seconds, until)

    @property
    def total(self) -> Figures:
        """Everything since the start; not to be changed."""
        self.current()
        return self._total

    @property
    def seconds(self) -> Mapping[int, Figures]:
        """The kept seconds that are finished."""
        self.current()
        return dict(sorted(self._seconds.items()))

    def _add(self, second: int, figures: Figures) -> None:
        self._seconds.setdefault(second, Figures()).add(figures)
        self._total.add(figures)
        horizon = int(self._now()) - KEPT_S
        for old in [kept for kept in self._seconds if kept < horizon]:
            del self._seconds[old]


def chart_points(points: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """One point for each second, or of many one for several: their means, and the greatest of their quantiles."""
    step = math.ceil(len(points) / most)
    return list(points) if step < 2 else [_merged(points[at : at + step]) for at in range(0, len(points), step)]


def _merged(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"second": points[0]["second"]}
    for name, first in points[0].items():
        values = [point[name] for point in points if point[name] is not None]
        if isinstance(first, dict):
            quantiles = {quantile for value in values for quantile in value}
            merged[name] = {each: max(value[each] for value in values if each in value) for each in quantiles}
        elif name != "second":
            merged[name] = sum(values) / len(values) if values else None
    return merged
