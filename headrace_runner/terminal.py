"""Terminal output: optional colours, and no control characters from other sources."""

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

BOLD, DIM, GREEN, RED, YELLOW = "\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[33m"
_PLAIN = "\033[0m"


def has_colours(stream: IO[str], environment: Mapping[str, str]) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR (https://no-color.org) or TERM=dumb is set."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


class Painter:
    """Colours text, or leaves it unchanged."""

    def __init__(self, coloured: bool) -> None:
        self._coloured = coloured

    def __call__(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._coloured else text


def printable(text: str, keep: str = "\n\t") -> str:
    """Makes text of a client or a model safe for a terminal: control characters become their escapes."""
    return "".join(
        character
        if character in keep or unicodedata.category(character)[0] != "C"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: str, width: int) -> str:
    """Text on one line, truncated to a width."""
    line = printable(" ".join(text.split()), keep="")
    return line if len(line) <= width else f"{line[: width - 1]}…"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Aligned lines, the titles first; the columns with these titles are aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = zip(row, titles, widths, strict=True)
        aligned = (cell.ljust(width) if title in left else cell.rjust(width) for cell, title, width in cells)
        lines.append("  ".join(aligned).rstrip())
    return lines


def short(path: Path) -> str:
    """A path relative to the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
