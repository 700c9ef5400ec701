"""The few shapes that our pictures are made of, as SVG text. Pure; the same shapes give the same bytes.

Written by hand: bars, lines and text need no library of the size of matplotlib. A picture brings its own background,
so that it is read on a dark page as on a light one, and names no font: widths of texts are estimates, on the wide side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

INK, FAINT, GRID, PAPER = "#333333", "#6b7280", "#e3e6ea", "white"
_WIDTH_OF_A_LETTER = 0.56  # Of the font's size; sans-serif fonts lie between 0.5 and 0.56.

Points = Sequence[tuple[float, float]]


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """A whole picture, one file that any browser shows."""
    size = f'width="{_number(width)}" height="{_number(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {_number(height)}" {size} '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            f'<rect {size} fill="{PAPER}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def group(x: float, y: float, parts: Iterable[str]) -> list[str]:
    """The parts, moved."""
    return [f'<g transform="translate({_number(x)} {_number(y)})">', *parts, "</g>"]


def text(
    x: float,
    y: float,
    words: str,
    size: int = 12,
    anchor: str = "start",
    fill: str | None = None,
    bold: bool = False,
    halo: bool = False,
) -> str:
    """Words on a baseline; `anchor` is start, middle or end. With `halo` they are read on top of lines too."""
    more = (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if bold else "")
    more += f' stroke="{PAPER}" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def text_width(words: str, size: int = 12) -> float:
    """How wide the words are at most, in nearly any font."""
    return len(words) * size * _WIDTH_OF_A_LETTER


def rect(
    x: float, y: float, width: float, height: float, fill: str, stroke: str | None = None, title: str | None = None
) -> str:
    """A box; `title` is what a browser shows beside the pointer."""
    more = f' stroke="{stroke}" stroke-width="1.5"' if stroke else ""
    place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    start = f'<rect {place} fill="{fill}"{more}'
    return f"{start}/>" if title is None else f"{start}><title>{escape(title)}</title></rect>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = INK, width: float = 1, dashes: str = "") -> str:
    """A straight line; `dashes` as SVG's stroke-dasharray."""
    return (
        f'<line x1="{_number(x1)}" x2="{_number(x2)}" y1="{_number(y1)}" y2="{_number(y2)}"'
        f' stroke="{stroke}"{_stroke(width, dashes)}/>'
    )


def polyline(points: Points, stroke: str, width: float = 1.5, dashes: str = "") -> str:
    """A line through the points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-linejoin="round"{_stroke(width, dashes)}/>'
    )


def dot(x: float, y: float, radius: float, fill: str) -> str:
    return f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" fill="{fill}"/>'


def ticks(most: float, count: int = 5) -> list[float]:
    """Round values from 0, about `count` of them, the last at `most` or the first round one beyond it."""
    if not most > 0:
        return [0.0, 1.0]
    rough = most / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def seconds(value: float) -> str:
    """A duration as it is read: 850 µs, 12.3 ms, 1.24 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _stroke(width: float, dashes: str) -> str:
    """Of a line, what is not the default."""
    return (f' stroke-width="{width}"' if width != 1 else "") + (f' stroke-dasharray="{dashes}"' if dashes else "")
