"""Search for marks, such as `<tool_call>`, in text that comes in pieces.

White space around a mark is layout and no part of the answer. At most `MAX_LAYOUT` characters of it are held back until
it is certain that a mark follows.
"""

from __future__ import annotations

MAX_LAYOUT = 64


def held_length(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be layout and the beginning of `mark`."""
    partial = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return partial + layout_length(text[: len(text) - partial])


def layout_length(text: str) -> int:
    """How many characters at the end of `text` are layout if a mark follows."""
    return min(len(text) - len(text.rstrip()), MAX_LAYOUT)
