"""The results as an SVG: a row a model, a panel a case, a bar a contender. Pure.

A bar is the median of tokens per second, its whisker the range of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from statistics import median
from typing import Any

from bench.cases import CASES, MILLRACE, TOKENS_PER_S, Case
from bench.report import series
from bench.svg import document, group, line, rect, text

_PANEL_WIDTH, _PANEL_HEIGHT = 400, 190
_BAR_HEIGHT, _BAR_STEP = 16, 24
_LABEL_WIDTH, _VALUE_WIDTH = 150, 60
_OURS, _THEIRS = "#1f6f8b", "#b8bfc6"


def plot(records: Mapping[str, Any]) -> str:
    """The throughput cases that were measured; one file that any browser shows."""
    shown = [case for case in CASES if case.measure == TOKENS_PER_S and case.name in records]
    rows = [list(cases) for _, cases in groupby(shown, key=lambda case: case.model)]
    width = max((len(row) for row in rows), default=1) * _PANEL_WIDTH
    height = len(rows) * _PANEL_HEIGHT + 40
    parts = [text(12, 24, "Tokens per second on one core: median of the rounds, whiskers from least to most", size=15)]
    for row, cases in enumerate(rows):
        for column, case in enumerate(cases):
            parts += group(column * _PANEL_WIDTH, row * _PANEL_HEIGHT + 40, _panel(case, records[case.name]))
    return document(width, height, parts)


def _panel(case: Case, record: Mapping[str, Any]) -> list[str]:
    callers = f"{case.callers} caller{'s' if case.callers > 1 else ''}"
    parts = [text(12, 14, f"{case.model}, {callers}, prompt {case.prompt_tokens}", size=13)]
    values = {name: series(record, name, TOKENS_PER_S) for name in record["contenders"]}
    most = max((max(rounds) for rounds in values.values()), default=1.0)
    scale = (_PANEL_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / most
    for index, (name, rounds) in enumerate(values.items()):
        y = 24 + index * _BAR_STEP
        middle, end, length = y + _BAR_HEIGHT / 2, max(rounds) * scale, median(rounds) * scale
        colour = _OURS if name == MILLRACE else _THEIRS
        parts += [
            text(_LABEL_WIDTH - 6, y + 12, name, anchor="end"),
            rect(_LABEL_WIDTH, y, length, _BAR_HEIGHT, colour),
            line(_LABEL_WIDTH + min(rounds) * scale, middle, _LABEL_WIDTH + end, middle),
            text(_LABEL_WIDTH + end + 5, y + 12, f"{median(rounds):.0f}"),
        ]
    return parts
