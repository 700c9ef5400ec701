"""The parts of an answer that is more than text: reasoning, calls of functions, and the text beside them.

What a parser takes in has these parts in order. A call is one `CallStart` and then its arguments, JSON text in pieces;
`number` counts the calls of an answer.

White space around a mark, such as `<tool_call>`, is layout and no part of the answer. At most `MAX_LAYOUT` characters
of it are held back until it is certain that a mark follows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_LAYOUT = 64


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    number: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Answer(NamedTuple):
    """Parts, and the number of tokens of the reasoning so far; None for a model without.

    `steps` are the same parts: those before the first token, and then those that each token added.
    """

    parts: Sequence[Part]
    reasoning_tokens: int | None = None
    steps: Sequence[Sequence[Part]] = ()


def begins_segment(part: Part, last: Part | None) -> bool:
    """Whether a part begins another reasoning, text or call than that of the part before it, None for none."""
    return isinstance(part, CallStart) or (not isinstance(part, CallArguments) and type(part) is not type(last))


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, with neighbours joined that continue each other."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallStart) or isinstance(last, CallStart) or type(part) is not type(last):
            found.append(part)
        else:
            found[-1] = part._replace(text=last.text + part.text)
    return found


def held_length(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be layout and the beginning of `mark`."""
    partial = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return partial + layout_length(text[: len(text) - partial])


def layout_length(text: str) -> int:
    """How many characters at the end of `text` are layout if a mark follows."""
    return min(len(text) - len(text.rstrip()), MAX_LAYOUT)
