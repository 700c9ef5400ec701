"""Knows the right answer of every request, and whether what its caller was told is it.

The answers are what the same stack gives before anything is done to it; to the last token, as is promised in fp32.
A wrong or repeated piece has no excuse. An answer that breaks off has one: a fault of the gateway or of the
transformer itself, of which there is but one each, while the request ran; and then the status must say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from tests.chaos.asks import SENTENCES, TEXT_WAYS, Ask, Story
from tests.chaos.load import BROKEN, OK, Client, Told

_RECONNECT_S = 0.5
# What becomes of a stream or a call when the gateway or the transformer goes away, or is away.
EXCUSED = frozenset({"UNAVAILABLE", "INTERNAL", "502", "503", BROKEN})
_TOO_LATE = frozenset({"DEADLINE_EXCEEDED", "504"})
# It would have been too late by the time it was its turn.
_SHED = frozenset({"RESOURCE_EXHAUSTED", "429"})
# What is refused: gRPC's status or HTTP's, who says so, and a part of what is said.
_REFUSALS = {
    "temperature": ("INVALID_ARGUMENT", "transformer", "temperature=-1"),
    "unknown model": ("NOT_FOUND", "transformer", "no model 'nobody'"),
    "too long": ("INVALID_ARGUMENT", "transformer", "the context is 1024"),
    "wrong endpoint": ("400", "transformer", "chat"),
    "tensor": ("INVALID_ARGUMENT", "transformer", "text_input"),
    "not JSON": ("400", "transformer", "JSON"),
}


class Answer(NamedTuple):
    """What a story's right answer is."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str


class Verdict(NamedTuple):
    """What became of a request, in one word, and where that is "wrong", why."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Span:
    """From when to when something was away or broken; `until` is infinite while it still is.

    A client whose connection broke may find out a little later that it is back.
    """

    since: float
    until: float

    def meets(self, told: Told) -> bool:
        return self.since <= told.ended and told.begun <= self.until + _RECONNECT_S


@dataclass
class Oracle:
    """`learn` first; then `judge` knows."""

    answers: dict[Story, Answer] = field(default_factory=dict)
    vectors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    async def learn(self, client: Client, stories: Iterable[Story]) -> None:
        """Asks for what is not known yet, of a stack that nothing is done to."""
        unknown = [story for story in dict.fromkeys(stories) if story not in self.answers]
        asks = [Ask(f"right answer {number}", "Generate", story) for number, story in enumerate(unknown)]
        for told in await asyncio.gather(*(_whole(client, ask) for ask in asks)):
            self.answers[told.ask.told] = Answer(told.text, told.token_ids, told.finish_reason or "")

    async def learn_vectors(self, client: Client) -> None:
        """Asks for the vector of each sentence."""
        asks = (Ask(f"right vector {number}", "embeddings") for number in count())
        while len(self.vectors) < len(SENTENCES):
            ask = next(asks)
            if ask.sentence not in self.vectors:
                self.vectors[ask.sentence] = (await _whole(client, ask)).pieces[0].vector

    def judge(self, told: Told, excuses: Iterable[Span]) -> Verdict:
        """`excuses`: when the gateway or the transformer was away."""
        reason = self._wrong_piece(told)
        if reason:
            return Verdict("wrong", reason)
        if told.left:
            return Verdict("left")
        if told.ask.way == "refused":
            outcome, reason = "refused", _not_refused(told)
        elif told.ask.manner == "has a deadline" and told.status in _TOO_LATE:
            outcome, reason = "late", _too_early(told)
        elif told.ask.manner == "has a deadline" and told.status in _SHED and not told.pieces:
            return Verdict("shed")
        else:
            outcome, reason = "right", self._not_whole(told)
        if not reason:
            return Verdict(outcome)
        if told.status in EXCUSED and any(span.meets(told) for span in excuses):
            return Verdict("excused")
        return Verdict("wrong", reason)

    def _wrong_piece(self, told: Told) -> str:
        """Why what came is no beginning of the right answer."""
        story = told.ask.story
        if story is None:
            return ""
        right = self.answers[story]
        if not right.text.startswith(told.text):
            return f"the text {told.text!r} is no beginning of {right.text!r}"
        ids = told.token_ids
        if ids and ids != list(right.token_ids[: len(ids)]):
            return f"the ids {ids} are no beginning of {right.token_ids}"
        return ""

    def _not_whole(self, told: Told) -> str:
        """Why what came is not all of the right answer."""
        if told.status != OK:
            return f"ended with {told.status} of the {told.hop}: {told.message[:300]}"
        if not told.pieces or told.finish_reason is None:
            return "ended well, without a last piece"
        ask = told.ask
        if ask.way in TEXT_WAYS:
            right = self.answers[ask.told]
            if told.text != right.text:
                return f"ended well after {told.text!r}, of {right.text!r}"
            if ask.way == "Generate" and told.token_ids != list(right.token_ids):
                return f"ended well after the ids {told.token_ids}, of {right.token_ids}"
            if told.finish_reason not in (right.finish_reason, "final"):
                return f"ended by {told.finish_reason}, not by {right.finish_reason}"
            return ""
        expected = ask.numbers if ask.way == "ModelInfer" else np.array(self.vectors[ask.sentence])
        got = np.array(told.pieces[0].vector)
        if got.shape == expected.shape and np.allclose(got, expected, atol=1e-5):
            return ""
        return f"{got[:5]}… came for {expected[:5]}…"


async def _whole(client: Client, ask: Ask) -> Told:
    told = await client.tell(ask)
    if told.status != OK:
        raise RuntimeError(f"{ask} ended with {told.status}: {told.message}, though nothing was done to the stack")
    return told


def _not_refused(told: Told) -> str:
    status, hop, message = _REFUSALS[told.ask.variant]
    if (told.status, told.hop) == (status, hop) and message in told.message:
        return ""
    return f"{told.ask.variant!r} got {told.status} of the {told.hop}: {told.message[:300]}"


def _too_early(told: Told) -> str:
    took, limit = told.ended - told.begun, told.ask.timeout_s
    # The gateway notices a deadline some milliseconds before it has passed.
    return f"the deadline of {limit:.3f} s passed after {took:.3f} s" if took < limit - 0.02 else ""
