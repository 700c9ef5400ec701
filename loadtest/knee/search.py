"""The search for the knee, and what is measured at a level of load: raise it until the objective breaks, then bisect.

A level that breaks is measured once more before it counts: one pause of the machine is not the knee. Pure.
"""

from dataclasses import dataclass

from loadtest import figures
from loadtest.figures import PROCESSOR_FULL, Figures

_CONFIRMATIONS = 2


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
    good_percent = found.good_percent() or 0.0
    times = {
        f"{measure}_{name}": value
        for measure in (figures.TTFT, figures.GAP, figures.WHOLE)
        for name, value in zip(("p50", "p99"), map(found.of(measure).quantile, (0.5, 0.99)), strict=True)
    }
    return Level(
        users=users,
        held=good_percent >= least_percent,
        requests=found.count(figures.REQUESTS),
        failed=found.count(figures.FAILED),
        good_percent=good_percent,
        goodput=found.count(figures.GOOD) / seconds,
        tokens=found.count(figures.TOKENS) / seconds,
        processor_full=found.processor >= PROCESSOR_FULL,
        **times,
    )


@dataclass
class KneeSearch:
    """`level` is the number of users to measure next, from `start` to `most`; `knee` the highest that held so far.

    The knee is exact to `precision`, a share of it, or to one user.
    """

    start: int
    most: int
    precision: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.most:
            raise ValueError(f"the search starts between 1 and {self.most} users, not at {self.start}")
        self.level = self.start
        self.knee = 0
        self.broken: int | None = None
        self.done = False
        self._breaks = 0

    @property
    def bounded(self) -> bool:
        """Whether a level above the knee broke: else the knee is higher than `most`."""
        return self.broken is not None

    def record(self, held: bool) -> None:
        """Whether the present level held; chooses the next one."""
        if not held:
            self._breaks += 1
            if self._breaks < _CONFIRMATIONS:
                return
            self.broken = self.level
        else:
            self.knee = self.level
        self._breaks = 0
        self._choose()

    def _choose(self) -> None:
        if self.broken is None:
            self.done = self.level >= self.most
            self.level = min(2 * self.level, self.most)
            return
        self.done = self.broken - self.knee <= max(1, self.precision * self.knee)
        if not self.done:
            self.level = (self.knee + self.broken) // 2
