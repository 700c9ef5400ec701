"""The right answer of every request, and the verdict on what its caller received.

The right answers are those of the same stack before any fault, equal to the last token, as promised in fp32.
A wrong or repeated piece has no excuse. An answer that breaks off has one: a fault of the gateway or of the
transformer itself, of which there is only one each, while the request ran; and the status must show it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from tests.chaos.load import BROKEN, OK, Call, Client
from tests.chaos.requests import SENTENCES, TEXT_WAYS, Request, Story

_RECONNECT_S = 0.5
# The status of a call whose gateway or transformer disappears, or is away.
EXCUSED = frozenset({"UNAVAILABLE", "INTERNAL", "502", "503", BROKEN})
_TOO_LATE = frozenset({"DEADLINE_EXCEEDED", "504"})
# A refusal of a request that would have missed its deadline.
_SHED = frozenset({"RESOURCE_EXHAUSTED", "429"})
# Wrong requests: the status of gRPC or HTTP, the hop that refuses, and a part of its message.
_REFUSALS = {
    "temperature": ("INVALID_ARGUMENT", "transformer", "temperature=-1"),
    "unknown model": ("NOT_FOUND", "transformer", "no model 'nobody'"),
    "too long": ("INVALID_ARGUMENT", "transformer", "the context is 1024"),
    "wrong endpoint": ("400", "transformer", "chat"),
    "tensor": ("INVALID_ARGUMENT", "transformer", "text_input"),
    "not JSON": ("400", "transformer", "JSON"),
}


class Answer(NamedTuple):
    """A story's right answer."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str


class Verdict(NamedTuple):
    """The outcome of a request in one word, and the reason if that is "wrong"."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Span:
    """The time during which something was away or broken; `until` is infinite while it still is.

    A client whose connection broke may notice a little later that it is back.
    """

    since: float
    until: float

    def meets(self, call: Call) -> bool:
        return self.since <= call.ended and call.begun <= self.until + _RECONNECT_S


@dataclass
class Oracle:
    """Call `record_answers` (and `record_vectors`) first, then `judge`."""

    answers: dict[Story, Answer] = field(default_factory=dict)
    vectors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    async def record_answers(self, client: Client, stories: Iterable[Story]) -> None:
        """Sends the stories without a recorded answer to a stack without faults."""
        unknown = [story for story in dict.fromkeys(stories) if story not in self.answers]
        requests = [Request(f"right answer {number}", "Generate", story) for number, story in enumerate(unknown)]
        for call in await asyncio.gather(*(_whole(client, request) for request in requests)):
            self.answers[call.request.required_story] = Answer(call.text, call.token_ids, call.finish_reason or "")

    async def record_vectors(self, client: Client) -> None:
        """Records the embedding of each sentence."""
        requests = (Request(f"right vector {number}", "embeddings") for number in count())
        while len(self.vectors) < len(SENTENCES):
            request = next(requests)
            if request.sentence not in self.vectors:
                self.vectors[request.sentence] = (await _whole(client, request)).pieces[0].vector

    def judge(self, call: Call, excuses: Iterable[Span]) -> Verdict:
        """`excuses`: when the gateway or the transformer was away."""
        reason = self._wrong_piece(call)
        if reason:
            return Verdict("wrong", reason)
        if call.left:
            return Verdict("left")
        if call.request.way == "refused":
            outcome, reason = "refused", _not_refused(call)
        elif call.request.manner == "has a deadline" and call.status in _TOO_LATE:
            outcome, reason = "late", _too_early(call)
        elif call.request.manner == "has a deadline" and call.status in _SHED and not call.pieces:
            return Verdict("shed")
        else:
            outcome, reason = "right", self._not_whole(call)
        if not reason:
            return Verdict(outcome)
        if call.status in EXCUSED and any(span.meets(call) for span in excuses):
            return Verdict("excused")
        return Verdict("wrong", reason)

    def _wrong_piece(self, call: Call) -> str:
        """Why the received pieces are no beginning of the right answer."""
        story = call.request.story
        if story is None:
            return ""
        right = self.answers[story]
        if not right.text.startswith(call.text):
            return f"the text {call.text!r} is no beginning of {right.text!r}"
        ids = call.token_ids
        if ids and ids != list(right.token_ids[: len(ids)]):
            return f"the ids {ids} are no beginning of {right.token_ids}"
        return ""

    def _not_whole(self, call: Call) -> str:
        """Why the received pieces are not the whole right answer."""
        if call.status != OK:
            return f"ended with {call.status} of the {call.hop}: {call.message[:300]}"
        if not call.pieces or call.finish_reason is None:
            return "ended well, without a last piece"
        request = call.request
        if request.way in TEXT_WAYS:
            right = self.answers[request.required_story]
            if call.text != right.text:
                return f"ended well after {call.text!r}, of {right.text!r}"
            if request.way == "Generate" and call.token_ids != list(right.token_ids):
                return f"ended well after the ids {call.token_ids}, of {right.token_ids}"
            if call.finish_reason not in (right.finish_reason, "final"):
                return f"ended by {call.finish_reason}, not by {right.finish_reason}"
            return ""
        expected = request.numbers if request.way == "ModelInfer" else np.array(self.vectors[request.sentence])
        got = np.array(call.pieces[0].vector)
        if got.shape == expected.shape and np.allclose(got, expected, atol=1e-5):
            return ""
        return f"{got[:5]}… came for {expected[:5]}…"


async def _whole(client: Client, request: Request) -> Call:
    call = await client.send(request)
    if call.status != OK:
        raise RuntimeError(f"{request} ended with {call.status}: {call.message}, though no fault was injected")
    return call


def _not_refused(call: Call) -> str:
    status, hop, message = _REFUSALS[call.request.variant]
    if (call.status, call.hop) == (status, hop) and message in call.message:
        return ""
    return f"{call.request.variant!r} got {call.status} of the {call.hop}: {call.message[:300]}"


def _too_early(call: Call) -> str:
    took, limit = call.ended - call.begun, call.request.timeout_s
    # The gateway notices a deadline some milliseconds before it has passed.
    return f"the deadline of {limit:.3f} s passed after {took:.3f} s" if took < limit - 0.02 else ""
