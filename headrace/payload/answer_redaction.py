"""Redacts an answer's chunks, whose texts are joined for the search: a match may begin in one chunk and end in another.

The replacement text goes into the chunk where the match begins. Token ids and log probabilities are removed from every
chunk up to the last one that a match touches, because they would reveal the redacted text: ids run ahead of their text,
never behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace_protos.headrace_pb2 import PayloadChunk


class Match(NamedTuple):
    """The place of a match in the joined text, in characters."""

    start: int
    end: int


def replace_all(chunks: Sequence[PayloadChunk], replacement: str) -> None:
    """Replaces the whole text: the first chunk with text gets the replacement, the other chunks none."""
    for chunk in chunks:
        if chunk.text:
            chunk.text, replacement = replacement, ""
    _clear_ids(chunks)


def replace(chunks: Sequence[PayloadChunk], matches: Sequence[Match], replacement: str) -> None:
    """Replaces each match; the matches are in order, and none is empty."""
    last = 0
    for number, (text, touched) in enumerate(_spliced([chunk.text for chunk in chunks], matches, replacement), 1):
        if touched:
            chunks[number - 1].text = text
            last = number
    _clear_ids(chunks[:last])


def _spliced(texts: Sequence[str], matches: Sequence[Match], replacement: str) -> Iterator[tuple[str, bool]]:
    """Each text with the matches of the joined text replaced, and whether a match touched it."""
    begin, number = 0, 0
    for text in texts:
        end, at, pieces, touched = begin + len(text), begin, [], False
        while number < len(matches) and matches[number].start < end:
            match = matches[number]
            if match.start >= begin:
                pieces += [text[at - begin : match.start - begin], replacement]
            at, touched = min(match.end, end), True
            if match.end > end:
                break  # The match continues in the next text.
            number += 1
        yield "".join([*pieces, text[at - begin :]]), touched
        begin = end


def _clear_ids(chunks: Sequence[PayloadChunk]) -> None:
    for chunk in chunks:
        chunk.ClearField("token_ids")
        chunk.ClearField("logprobs")
