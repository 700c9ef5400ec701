"""Takes text out of an answer's chunks, which together are one text: a match may begin in one and end in another.

What stands for a match goes into the chunk where it begins. The ids and log probabilities of the chunks up to
the last one that a match touches go too, for they spell what is taken out: ids run ahead of their text, never
behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace_protos.millrace_pb2 import PayloadChunk


class Match(NamedTuple):
    """A part of the joined text, in characters."""

    start: int
    end: int


def take_out(chunks: Sequence[PayloadChunk], stands: str) -> None:
    """Takes out the whole text; `stands` stands for it."""
    for chunk in chunks:
        if chunk.text:
            chunk.text, stands = stands, ""
    _forget_ids(chunks)


def replace(chunks: Sequence[PayloadChunk], matches: Sequence[Match], stands: str) -> None:
    """Takes out the matches, which are in order and none of them empty; `stands` stands for each."""
    last = 0
    for number, (text, touched) in enumerate(_spliced([chunk.text for chunk in chunks], matches, stands), 1):
        if touched:
            chunks[number - 1].text = text
            last = number
    _forget_ids(chunks[:last])


def _spliced(texts: Sequence[str], matches: Sequence[Match], stands: str) -> Iterator[tuple[str, bool]]:
    """Each text without its share of the matches, which are of the joined text, and whether it had one."""
    begin, number = 0, 0
    for text in texts:
        end, at, pieces, touched = begin + len(text), begin, [], False
        while number < len(matches) and matches[number].start < end:
            match = matches[number]
            if match.start >= begin:
                pieces += [text[at - begin : match.start - begin], stands]
            at, touched = min(match.end, end), True
            if match.end > end:
                break  # The next text has more of it.
            number += 1
        yield "".join([*pieces, text[at - begin :]]), touched
        begin = end


def _forget_ids(chunks: Sequence[PayloadChunk]) -> None:
    for chunk in chunks:
        chunk.ClearField("token_ids")
        chunk.ClearField("logprobs")
