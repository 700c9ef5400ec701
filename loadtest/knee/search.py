"""The search for the knee, and what is measured at a level of load: raise it until the objective breaks, then bisect.

One pause of the machine is not the knee: a level that breaks is measured once more before it counts, unless it is lost
without the worst half of its seconds too. Pure, but for the reports: JSON, Markdown, and a picture where matplotlib is
installed.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest import figures
from loadtest.figures import PROCESSOR_FULL, Figures

_CONFIRMATIONS = 2


@dataclass(frozen=True)
class Level:
    """What was measured with so many users; rates a second, times in milliseconds (None without such a measure).

    `lost`: whether it broke beyond doubt, see `is_lost`.
    """

    users: int
    held: bool
    lost: bool
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


def is_lost(course: Sequence[Figures], seconds: int, least_percent: float) -> bool:
    """Whether a level of so many seconds has broken by the figures of its first ones, whatever follows.

    Requests to come count as good, and so do those of the worst half of its time, in which the machine may have paused.
    """
    bad = [found.count(figures.REQUESTS) - found.count(figures.GOOD) for found in course]
    worst = max(sum(bad[start : start + seconds // 2]) for start in range(len(bad)))
    expected = sum(found.count(figures.REQUESTS) for found in course) * seconds / len(course)
    return sum(bad) - worst > (1 - least_percent / 100) * expected


def measured(found: Figures, users: int, seconds: int, least_percent: float, *, lost: bool = False) -> Level:
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
        lost=lost,
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

    def record(self, held: bool, lost: bool = False) -> None:
        """Whether the present level held, or broke beyond doubt; chooses the next one."""
        if not held:
            self._breaks += 1
            if self._breaks < _CONFIRMATIONS and not lost:
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


NAME = "knee"


@dataclass(frozen=True)
class Knee:
    """Of one kind of user. `knee`: users; `bounded`: whether more than that broke the objective."""

    user: str
    row: str
    knee: int
    bounded: bool
    levels: Sequence[Level]

    @property
    def at_knee(self) -> Level | None:
        return next((level for level in reversed(self.levels) if level.users == self.knee and level.held), None)


def write(folder: Path, conditions: dict[str, Any], knees: Sequence[Knee]) -> list[Path]:
    """Writes the reports; the paths of those that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        **conditions,
        "knees": [{**asdict(knee), "at_knee": asdict(knee.at_knee) if knee.at_knee else None} for knee in knees],
    }
    data, text = folder / f"{NAME}.json", folder / f"{NAME}.md"
    data.write_text(json.dumps(report, indent=2) + "\n")
    picture = folder / f"{NAME}.png"
    drawn = draw(picture, conditions, knees)
    text.write_text(markdown(report, knees, picture.name if drawn else ""))
    return [data, text, *([picture] if drawn else [])]


def markdown(report: dict[str, Any], knees: Sequence[Knee], picture: str) -> str:
    lines = ["# The knee", "", f"{report['date']}, {report['cores']} cores. Objective: {report['objective']}."]
    lines += ["", "| condition | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report.items() if name not in ("date", "cores", "knees")]
    lines += ["", "| user | knee, users | good requests/s | tokens/s | TTFT p50 / p99, ms | gap p50 / p99, ms |"]
    lines += ["|---|---|---|---|---|---|"]
    for knee in knees:
        level, users = knee.at_knee, f"{knee.knee}" if knee.bounded else f"{knee.knee} or more"
        figures = _cells(level) if level else ["-"] * 4
        lines.append("| " + " | ".join([knee.user, users, *figures]) + " |")
    for knee in knees:
        lines += ["", f"## {knee.user} (`{knee.row}`)", ""]
        lines += [
            "| users | good % | requests | failed | good requests/s | tokens/s | TTFT p50 / p99 | gap p50 / p99 |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for level in sorted(knee.levels, key=lambda level: level.users):
            own = [str(level.users), f"{level.good_percent:.1f}", str(level.requests), str(level.failed)]
            lines.append("| " + " | ".join([*own, *_cells(level)]) + " |")
        if any(level.processor_full for level in knee.levels):
            lines += [
                "",
                "A Locust process had no processor time left at some level: add `--processes` before believing it.",
            ]
    if picture:
        lines += ["", f"![Good requests by users]({picture})"]
    return "\n".join(lines) + "\n"


def draw(path: Path, conditions: dict[str, Any], knees: Sequence[Knee]) -> bool:
    """Draws good requests by users; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for knee in knees:
        levels = sorted(knee.levels, key=lambda level: level.users)
        (line,) = axes.plot(
            [level.users for level in levels],
            [level.good_percent for level in levels],
            marker="o",
            label=f"{knee.user}: {knee.knee}",
        )
        axes.axvline(knee.knee, color=line.get_color(), linestyle=":", linewidth=1)
    axes.axhline(conditions["good_percent"], color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="users", ylabel="good requests, %", ylim=(0, 103), title=f"Objective: {conditions['objective']}")
    axes.set_xscale("log", base=2)
    users = sorted({level.users for knee in knees for level in knee.levels})
    axes.set_xticks(users, labels=[str(number) for number in users])
    axes.legend(title="knee, users")
    FigureCanvasAgg(figure).print_png(path)
    return True


def _cells(level: Level) -> list[str]:
    times = ((level.ttft_p50, level.ttft_p99), (level.gap_p50, level.gap_p99))
    pairs = ["-" if pair[0] is None or pair[1] is None else f"{pair[0]:.1f} / {pair[1]:.1f}" for pair in times]
    return [f"{level.goodput:.2f}", f"{level.tokens:.1f}", *pairs]
