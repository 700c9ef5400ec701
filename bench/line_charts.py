"""Figures over time as an SVG: panels of lines on one time axis, with marks for what was done meanwhile. Pure.

A line is interrupted where its figure was not there: a point that is no finite number, or none for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from bench.svg import FAINT, GRID, INK, Points, document, dot, group, line, polyline, text, text_width, ticks

_COLUMNS = 2
_PANEL_WIDTH, _PANEL_HEIGHT = 540, 236
_LEFT, _RIGHT, _BOTTOM = 52, 24, 26
_TITLE_HEIGHT, _LEGEND_HEIGHT, _HEAD = 30, 16, 48
_SIZE = 11
_MARK = "#c2253c"
_GAP = 2.5  # So many steps without a point are one.


@dataclass(frozen=True)
class Line:
    """One figure: (seconds since the beginning, value), in the order of time."""

    label: str
    points: Points
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Panel:
    """Figures of one unit. `log`: equal distances are equal ratios, and what is not above 0 is not there."""

    title: str
    lines: tuple[Line, ...]
    log: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that was done to the stack."""

    at_s: float
    words: str


class _Scale(NamedTuple):
    """Where values lie from `top` down to `bottom`."""

    least: float
    most: float
    top: float
    bottom: float
    seconds: float
    log: bool

    def y(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.least) / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self.bottom - share * (self.bottom - self.top)

    def x(self, at_s: float) -> float:
        return _LEFT + at_s / self.seconds * (_PANEL_WIDTH - _LEFT - _RIGHT)


def line_charts(title: str, panels: Sequence[Panel], seconds: float, marks: Sequence[Mark] = ()) -> str:
    """All panels, two beside each other, of what was between 0 and `seconds`."""
    parts = [text(12, 24, title, size=15), *_told(marks)]
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        parts += group(column * _PANEL_WIDTH, _HEAD + row * _PANEL_HEIGHT, _panel(panel, seconds, marks))
    rows = math.ceil(len(panels) / _COLUMNS)
    return document(_COLUMNS * _PANEL_WIDTH, _HEAD + rows * _PANEL_HEIGHT + 8, parts)


def _told(marks: Sequence[Mark]) -> list[str]:
    """What the marks mean, at the right of the title."""
    parts, x = [], float(_COLUMNS * _PANEL_WIDTH - _RIGHT)
    for mark in reversed(marks):
        width = text_width(mark.words)
        parts += [
            text(x - width, 24, mark.words, fill=_MARK),
            line(x - width - 8, 12, x - width - 8, 28, stroke=_MARK, dashes="4 3"),
        ]
        x -= width + 28
    return parts


def _panel(panel: Panel, seconds: float, marks: Iterable[Mark]) -> list[str]:
    legend, legend_rows = _legend(panel.lines)
    top = _TITLE_HEIGHT + legend_rows * _LEGEND_HEIGHT
    values = [value for each in panel.lines for piece in _pieces(each.points, panel.log) for _, value in piece]
    levels = _decades(values) if panel.log else ticks(max(values, default=1.0), 4)
    scale = _Scale(levels[0], levels[-1], top, _PANEL_HEIGHT - _BOTTOM, seconds, panel.log)
    parts = [text(12, 16, panel.title, size=13, bold=True), *legend]
    for level in levels:
        y = scale.y(level)
        parts += [
            line(_LEFT, y, _PANEL_WIDTH - _RIGHT, y, stroke=GRID),
            text(_LEFT - 6, y + 4, _figure(level, panel.percent), size=_SIZE, anchor="end", fill=FAINT),
        ]
    for at_s in (mark for mark in ticks(seconds, 6) if mark <= seconds):
        parts.append(text(scale.x(at_s), scale.bottom + 16, f"{at_s:g} s", size=_SIZE, anchor="middle", fill=FAINT))
    parts.append(line(_LEFT, scale.bottom, _PANEL_WIDTH - _RIGHT, scale.bottom, stroke=FAINT))
    parts += [
        line(scale.x(mark.at_s), scale.top, scale.x(mark.at_s), scale.bottom, stroke=_MARK, dashes="4 3")
        for mark in marks
    ]
    for each in panel.lines:
        for piece in _pieces(each.points, panel.log):
            places = [(scale.x(at_s), scale.y(value)) for at_s, value in piece if 0 <= at_s <= seconds]
            if len(places) > 1:
                parts.append(polyline(places, each.colour, dashes=each.dashes))
            elif places:
                parts.append(dot(*places[0], 2, each.colour))
    if not values:
        parts.append(text(_PANEL_WIDTH / 2, (scale.top + scale.bottom) / 2, "nothing measured", anchor="middle"))
    return parts


def _legend(lines: Iterable[Line]) -> tuple[list[str], int]:
    """What is drawn, and in how many rows."""
    parts, x, row = [], float(_LEFT), 0
    for each in lines:
        width = 24 + text_width(each.label, _SIZE) + 14
        if x > _LEFT and x + width > _PANEL_WIDTH - _RIGHT:
            x, row = float(_LEFT), row + 1
        y = _TITLE_HEIGHT + row * _LEGEND_HEIGHT
        parts += [
            line(x, y, x + 18, y, stroke=each.colour, width=2, dashes=each.dashes),
            text(x + 23, y + 4, each.label, size=_SIZE, fill=INK),
        ]
        x += width
    return parts, row + 1


def _pieces(points: Points, log: bool) -> list[list[tuple[float, float]]]:
    """The points that are figures, cut where some are missing."""
    steps = sorted(after[0] - before[0] for before, after in pairwise(points))
    longest = _GAP * steps[len(steps) // 2] if steps else 0.0
    pieces: list[list[tuple[float, float]]] = []
    last: float | None = None
    for at_s, value in points:
        if not math.isfinite(value) or (log and value <= 0):
            last = None
            continue
        if last is None or at_s - last > longest:
            pieces.append([])
        pieces[-1].append((at_s, value))
        last = at_s
    return pieces


def _decades(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around the values; only the powers where these are many."""
    least, most = min(values, default=1.0), max(values, default=10.0)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    many = len(powers) > 4
    marks = [times * 10.0**power for power in powers for times in ((1,) if many else (1, 2, 5))]
    first = max((index for index, mark in enumerate(marks) if mark <= least), default=0)
    last = min((index for index, mark in enumerate(marks) if mark >= most), default=len(marks) - 1)
    return marks[first : max(last, first + 1) + 1]


def _figure(value: float, percent: bool) -> str:
    return f"{value * 100:g} %" if percent else f"{value:g}"
