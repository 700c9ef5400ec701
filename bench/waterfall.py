"""Traces as an SVG: a row a span, indented as deep as it lies, its bar where it was in time, its events as ticks. Pure.

A span stands below the one that called it, in the order of time; the bars' colours say whose they are. A dotted line
goes from a span to each one that links to it. Where the linked span is not there, for its process was killed with it,
the linking one says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import NamedTuple

from bench.spans import Event, Span
from bench.svg import FAINT, GRID, INK, document, group, line, polyline, rect, seconds, text, text_width, ticks

WIDTH = 1080
_LABEL_WIDTH, _RIGHT = 350, 76
_INDENT, _BAR_HEIGHT, _ROW_HEIGHT, _LANE_HEIGHT = 11, 14, 24, 14
_SIZE = 11
_MOST_LABELS = 8  # Of one span's events; the others are ticks alone.
_ERROR = "#c2253c"
_COLOURS = {
    "client": "#4b5563",
    "envoy-ingress": "#b45fd0",
    "envoy-inner": "#7a54c7",
    "millrace-transformer": "#1f6f8b",
    "millrace-predictor": "#d9822b",
    "millrace-logger": "#4c9a58",
}
_OTHERS = ("#9b6a4f", "#5f7f9e", "#a0a03c")


@dataclass(frozen=True)
class Trace:
    """What is drawn together: spans of one trace, and those of others that link to it."""

    title: str
    spans: tuple[Span, ...]


class _Label(NamedTuple):
    """Words below a bar, at `x` of a tick; from `left` to `right`, `lane` lines down."""

    words: str
    x: float
    left: float
    right: float
    lane: int

    @property
    def anchor(self) -> str:
        return "start" if self.left >= self.x else "end"


class _Row(NamedTuple):
    span: Span
    depth: int
    labels: tuple[_Label, ...]

    @property
    def height(self) -> int:
        lanes = 1 + max((label.lane for label in self.labels), default=-1)
        return _ROW_HEIGHT + lanes * _LANE_HEIGHT


class _Scale(NamedTuple):
    begin_ns: int
    pixels_per_ns: float

    def x(self, time_ns: int) -> float:
        return _LABEL_WIDTH + (time_ns - self.begin_ns) * self.pixels_per_ns


def waterfall(traces: Sequence[Trace]) -> str:
    """The traces, one below the other, each with a time axis of its own."""
    parts: list[str] = []
    colours = _colours([span for trace in traces for span in trace.spans])
    y = 12.0
    for trace in traces:
        drawn, height = _trace(trace, colours)
        parts += group(0, y, drawn)
        y += height + 22
    return document(WIDTH, round(y), parts)


def in_order(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span with its depth, below its caller and in the order of time; one without a caller here is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
        children[span.parent_id if span.parent_id in known else ""].append(span)
    ordered: list[tuple[Span, int]] = []
    waiting = [(span, 0) for span in reversed(children[""])]
    while waiting:
        span, depth = waiting.pop()
        ordered.append((span, depth))
        waiting += [(child, depth + 1) for child in reversed(children[span.span_id])]
    return ordered


def short_name(name: str) -> str:
    """A span's name without the packages before a gRPC service."""
    return re.sub(r"/?\b(?:\w+\.)+(\w+/\w+)", r"\1", name)


def _trace(trace: Trace, colours: Mapping[str, str]) -> tuple[list[str], float]:
    """What is drawn, and how high it is."""
    if not trace.spans:
        return [text(12, 14, f"{trace.title}: no spans", size=15)], 20
    begin = min(span.start_ns for span in trace.spans)
    duration_ns = max(1, max(_end_ns(span) for span in trace.spans) - begin)
    scale = _Scale(begin, (WIDTH - _LABEL_WIDTH - _RIGHT) / duration_ns)
    known = {span.span_id: span for span in trace.spans}
    rows = [_Row(span, depth, _labels(span, known, scale)) for span, depth in in_order(trace.spans)]
    top, bottom = 64, 64 + sum(row.height for row in rows)
    parts = [text(12, 14, trace.title, size=15), *_legend(rows, colours), *_axis(scale, duration_ns, top, bottom)]
    above = accumulate((row.height for row in rows[:-1]), initial=top)
    tops = {row.span.span_id: y for row, y in zip(rows, above, strict=True)}
    for row in rows:  # First, to lie behind bars and words.
        parts += _links(row.span, known, tops, scale)
    for row in rows:
        y = tops[row.span.span_id]
        if y > top:
            parts.append(line(12, y, WIDTH - 12, y, stroke=GRID))
        parts += _row(row, y, scale, colours[row.span.service])
    return parts, bottom


def _row(row: _Row, y: float, scale: _Scale, colour: str) -> list[str]:
    span, bar_y, baseline = row.span, y + (_ROW_HEIGHT - _BAR_HEIGHT) / 2, y + _ROW_HEIGHT / 2 + 4
    failed = span.status == "ERROR"
    left, right = scale.x(span.start_ns), scale.x(span.end_ns)
    status = str(span.attributes.get("rpc.response.status_code", "ERROR")) if failed else ""
    told = f"{seconds(span.seconds)} {status}".strip()
    indent = 12 + row.depth * _INDENT
    parts = [
        rect(indent, bar_y + 2, 10, 10, colour),
        text(indent + 15, baseline, _fitting(short_name(span.name), _LABEL_WIDTH - indent - 21), size=_SIZE),
        rect(
            left,
            bar_y,
            max(1.5, right - left),
            _BAR_HEIGHT,
            colour,
            _ERROR if failed else None,
            f"{span.service}: {span.name}, {span.kind}, {told}",
        ),
    ]
    # Beside the bar, on the side where there is room.
    width, ink = text_width(told, _SIZE), _ERROR if failed else INK
    if right + 5 + width <= WIDTH - 4:
        parts.append(text(right + 5, baseline, told, size=_SIZE, fill=ink, halo=True))
    elif left - 5 - width >= _LABEL_WIDTH:
        parts.append(text(left - 5, baseline, told, size=_SIZE, anchor="end", fill=ink, halo=True))
    else:
        parts.append(text(right - 5, baseline, told, size=_SIZE, anchor="end", fill="white"))
    parts += [
        line(scale.x(event.time_ns), bar_y - 2, scale.x(event.time_ns), bar_y + _BAR_HEIGHT + 2, width=1.5)
        for event in span.events
    ]
    for label in row.labels:
        label_y = y + _ROW_HEIGHT + (label.lane + 0.5) * _LANE_HEIGHT + 1
        parts += [
            line(label.x, bar_y + _BAR_HEIGHT, label.x, label_y, stroke=FAINT),
            text(
                label.x + (4 if label.anchor == "start" else -4),
                label_y + 2,
                label.words,
                _SIZE,
                label.anchor,
                halo=True,
            ),
        ]
    return parts


def _labels(span: Span, known: Mapping[str, Span], scale: _Scale) -> tuple[_Label, ...]:
    """Words for the span's first events and for the links that lead nowhere, none over another or through its line."""
    # Where a span ends is seen without words.
    events = [event for event in span.events if event.name != "end" or event.attributes][:_MOST_LABELS]
    told = [(scale.x(event.time_ns), _words(event, span)) for event in events]
    if any(link.span_id not in known for link in span.links):
        told.append((scale.x(span.start_ns), "goes on after a span that was lost with its process"))
    told.sort(reverse=True)  # From the right: what is left of others goes below them.
    to_the_left = [each for each in told if each[0] + text_width(each[1], _SIZE) + 10 > WIDTH - 8]
    to_the_right = [each for each in told if each not in to_the_left]
    return min(_placed(to_the_left, to_the_right), _placed((), [*to_the_right, *to_the_left]), key=_untidiness)


def _placed(first: Sequence[tuple[float, str]], then: Sequence[tuple[float, str]]) -> tuple[_Label, ...]:
    """Each in the first lane where it is free, in this order."""
    placed: list[_Label] = []
    for x, words in [*first, *then]:
        width = text_width(words, _SIZE) + 10
        left = x if x + width <= WIDTH - 8 else x - width
        choices = [_Label(words, x, left, left + width, lane) for lane in range(len(placed) + 1)]
        free = [one for one in choices if not any(_overlap(one, other) for other in placed)]
        placed.append(next((one for one in free if not any(_cross(one, other) for other in placed)), free[-1]))
    return tuple(placed)


def _untidiness(labels: Sequence[_Label]) -> tuple[int, int]:
    crossings = sum(_cross(one, other) for one, other in combinations(labels, 2))
    return crossings, max((label.lane for label in labels), default=0)


def _overlap(one: _Label, other: _Label) -> bool:
    return one.lane == other.lane and one.right > other.left and other.right > one.left


def _cross(one: _Label, other: _Label) -> bool:
    """Whether the line down to the lower one goes through the words of the upper one."""
    upper, lower = (one, other) if one.lane < other.lane else (other, one)
    return upper.lane < lower.lane and upper.left + 3 < lower.x < upper.right - 3


def _words(event: Event, span: Span) -> str:
    tokens = event.attributes.get("gen_ai.usage.output_tokens")
    after = seconds(max(0, event.time_ns - span.start_ns) / 1e9)
    return f"{event.name} +{after}" + (f", {tokens} tokens" if tokens is not None else "")


def _links(span: Span, known: Mapping[str, Span], tops: Mapping[str, float], scale: _Scale) -> list[str]:
    """From the end of each linked span to the beginning of this one."""
    parts = []
    for link in span.links:
        if (earlier := known.get(link.span_id)) is not None:
            x, y = scale.x(span.start_ns), tops[span.span_id] + _ROW_HEIGHT / 2
            from_x, from_y = scale.x(min(earlier.end_ns, span.start_ns)), tops[earlier.span_id] + _ROW_HEIGHT / 2
            corners = [(from_x, from_y), (x - 6, from_y), (x - 6, y), (x, y)]
            parts.append(polyline(corners, INK, width=1, dashes="2 3"))
    return parts


def _axis(scale: _Scale, duration_ns: int, top: float, bottom: float) -> list[str]:
    parts = []
    for mark in ticks(duration_ns / 1e9, 6):
        x = scale.x(scale.begin_ns + round(mark * 1e9))
        if x > WIDTH - _RIGHT + 1:
            break
        parts += [
            line(x, top - 4, x, bottom, stroke=GRID),
            text(x, top - 9, seconds(mark) if mark else "0", size=_SIZE, anchor="middle", fill=FAINT),
        ]
    return parts


def _legend(rows: Sequence[_Row], colours: Mapping[str, str]) -> list[str]:
    parts, x = [], 12.0
    for service in dict.fromkeys(row.span.service for row in rows):
        parts += [rect(x, 24, 10, 10, colours[service]), text(x + 14, 33, service, size=_SIZE)]
        x += 14 + text_width(service, _SIZE) + 16
    return parts


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    unknown = sorted({span.service for span in spans} - _COLOURS.keys())
    return _COLOURS | {service: _OTHERS[index % len(_OTHERS)] for index, service in enumerate(unknown)}


def _end_ns(span: Span) -> int:
    return max(span.end_ns, *(event.time_ns for event in span.events), span.end_ns)


def _fitting(words: str, width: float) -> str:
    """The words, cut where they are wider."""
    if text_width(words, _SIZE) <= width:
        return words
    return words[: int(width / text_width("m", _SIZE)) - 1] + "…"
