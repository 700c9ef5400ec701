"""Admission of generations: those that are expected to end within their deadline.

A generation that would end too late is refused before any work is done, but never because of another client's queue. A
refusal may be delayed, see `RefusalPace`.

`LoadEstimate` estimates how long a generation would take, from its arrival to its last token, from the current speed of
its model.

Predictors know their queues, but not how long a call waited before it reached them, nor how long its answer waits on
the way back. If a batch has room for all there is no queue, but every answer becomes slower, and all are late. This
estimate includes all of it: the time between two tokens of an answer as they leave the transformer, and the number of
answers that shared the machine. A step of a batch costs a constant and something for each sequence, so the time for a
token grows with `sequences + _BASE`. If nothing is known, or nothing runs, no request is refused.

Clients that compete have turns at the predictors, so a queue is its own client's. A new request expects beside it all
of its client's, of each other client those that are answered already or at most as many per weight as its own client
has, and the wait for a first token that its client's requests have had: none if none of them is in flight.

A refusal takes a millisecond of processor time. Callers that ignore `retry-after` and retry at once would use all cores
for refusals. So above a rate each refusal is held back, within its deadline.

The estimate is pure; the caller passes the time, in seconds.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.clients import ANYONE, Client
from headrace.errors import OverloadedError
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.models.models import TextModel

_HELD = 0.9, 1.5  # A gap between these multiples of a pace's interval is the pace's doing.
_BASE = 64  # Sequences at which a step takes twice as long as an empty one would; few machines are worse.
_MARGIN = 3.0  # Durations of equal answers differ by this factor, and all work for a late answer is lost.
_MEMORY_S = 1.0  # Older measurements have less than a third of the weight.
_ENOUGH = 64  # Tokens that were measured recently.
_PAUSE_S = 2.0  # Without a token of any answer: the predictor was unavailable, which is not its speed.
_IDLE_CLIENTS = 64  # Those without requests in flight that are remembered, at most.
_LENGTHS = 64  # Answers whose lengths are known.
_FEW_LENGTHS = 16
_LONG = 0.9  # Nine of ten answers are not longer than the expected length.
_WEIGHT = 0.1  # Of one first token in the mean.
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 10.0
_REFUSALS_PER_S = 60.0
_LONGEST_HOLD_S = 4.25
_SHARE_OF_LEFT = 0.85  # The share of a caller's remaining time that a delay may take.
_SPREAD = 0.3
_LAG_WEIGHT = 0.05  # Of one delay in the mean.
_GOLDEN_RATIO = 0.618034


class Admission:
    """Owned by the event loop; one for all requests."""

    def __init__(self) -> None:
        self._loads: dict[str, LoadEstimate] = {}  # By model.
        self._pace = RefusalPace()

    def admitted(self, request: TextRequest, model: TextModel) -> "AdmittedGeneration":
        """The generation, which counts until its end; raises OverloadedError."""
        load = self._loads.setdefault(model.name, LoadEstimate())
        now, given = time.monotonic(), request.sampling.get("max_tokens")
        max_tokens = given if isinstance(given, int) else request.default_max_tokens or model.limits.default_tokens(0)
        client = request.call.account
        retry_after_s = load.retry_after_s(request.call.deadline.at - now, max_tokens, now, client)
        if retry_after_s is not None:
            message = "too many requests are in progress to answer this one before its deadline"
            raise OverloadedError(message, retry_after_ms=int(1000 * retry_after_s))
        load.began(client)
        return AdmittedGeneration(load, client, request.call.arrived, _pace_of(request.sampling))

    @asynccontextmanager
    async def holding_refusals(self, request: TextRequest) -> AsyncIterator[None]:
        """Delays the block's OverloadedError if there are many; see `RefusalPace`."""
        try:
            yield
        except OverloadedError:
            now = time.monotonic()
            hold_s = self._pace.hold_s(request.call.deadline.at - now, now)
            await asyncio.sleep(hold_s)
            self._pace.held(time.monotonic() - now - hold_s)
            raise


class AdmittedGeneration(AbstractContextManager["AdmittedGeneration"]):
    """One generation, as its model's load estimate sees it; gaps as long as its pace do not show the model's speed."""

    def __init__(self, load: "LoadEstimate", client: Client, arrived: float, pace: float = 0.0) -> None:
        self._load = load
        self._client = client
        self._arrived = arrived
        self._pace = pace
        self._tokens = 0
        self._latest_s: float | None = None  # Since the arrival.
        self._ended = False

    def chunk(self, chunk: TextChunk) -> None:
        """Measures a chunk that has come; the gap before a resumed answer is excluded."""
        if self._latest_s is None:
            self._load.first_token(chunk.elapsed_s, self._client)
        elif not chunk.tokens.resumed:
            gap_s, tokens = chunk.elapsed_s - self._latest_s, len(chunk.tokens.token_ids)
            if not (tokens and _HELD[0] <= gap_s * self._pace / tokens <= _HELD[1]):
                self._load.more_tokens(tokens, gap_s, self._arrived + chunk.elapsed_s)
        self._latest_s = chunk.elapsed_s
        self._tokens += len(chunk.tokens.token_ids)
        self._ended = chunk.end is not None

    def __exit__(self, *_: object) -> None:
        """Ends the measurement, however the generation ended."""
        if self._latest_s is not None:
            self._load.answer_ended(self._client)
        self._load.ended(self._tokens if self._ended else None, self._client)


def _pace_of(sampling: Mapping[str, Any]) -> float:
    """The pace that a request gives, 0 for none; a malformed one is refused later."""
    try:
        return max(0.0, float(sampling.get("pace") or 0))
    except (TypeError, ValueError):
        return 0.0


@dataclass(slots=True)
class _Share:
    """The requests of one client."""

    weight: float
    in_flight: int = 0
    answering: int = 0
    first_token_s: float = 0.0  # From the arrival, on the average.


@dataclass
class LoadEstimate:
    """The load of one model."""

    in_flight: int = 0
    _answering: int = 0  # Of those in flight, the ones that have a first token.
    # Of the last seconds: tokens, their durations, and the number of concurrent answers for each.
    _tokens: float = 0.0
    _token_s: float = 0.0
    _beside: float = 0.0
    _as_of: float = 0.0
    _latest: float = -math.inf  # When the newest token came.
    _running_since: float = -math.inf  # When the first token came after the latest pause.
    _shares: dict[str, _Share] = field(default_factory=dict)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_LENGTHS))

    def began(self, client: Client = ANYONE) -> None:
        """Records that a generation was admitted."""
        self.in_flight += 1
        share = self._shares.get(client.name)
        if share is None:
            if len(self._shares) >= _IDLE_CLIENTS:
                self._shares = {name: each for name, each in self._shares.items() if each.in_flight}
            share = self._shares[client.name] = _Share(client.policy.weight)
        share.weight = client.policy.weight
        if not share.in_flight:  # Earlier waits do not predict the current one.
            share.first_token_s = 0.0
        share.in_flight += 1

    def first_token(self, waited_s: float, client: Client = ANYONE) -> None:
        """Records the time from a request's arrival to its first token."""
        self._answering += 1
        share = self._shares[client.name]
        share.answering += 1
        share.first_token_s += _WEIGHT * (waited_s - share.first_token_s)

    def more_tokens(self, count: int, gap_s: float, now: float) -> None:
        """Records `count` tokens of an answer, `gap_s` after the previous ones.

        A gap that includes a pause of all answers is ignored.
        """
        if now - self._latest > _PAUSE_S:
            self._running_since = now
        self._latest = now
        if now - gap_s < self._running_since:
            return
        self._forget(now)
        self._tokens += count
        self._token_s += gap_s
        self._beside += count * self._answering

    def ended(self, length: int | None, client: Client = ANYONE) -> None:
        """Records that a generation has ended; `length` is its number of tokens, None if it did not finish."""
        self.in_flight -= 1
        self._shares[client.name].in_flight -= 1
        if length is not None:
            self._lengths.append(length)

    def answer_ended(self, client: Client = ANYONE) -> None:
        """Records the end of an answer that had begun, for any reason."""
        self._answering -= 1
        self._shares[client.name].answering -= 1

    def retry_after_s(self, left_s: float, max_tokens: int, now: float, client: Client = ANYONE) -> float | None:
        """None if the generation would end within `left_s` or too little is known; else the seconds until a retry."""
        self._forget(now)
        if self._tokens < _ENOUGH or not self.in_flight or left_s == math.inf:
            return None
        per_token_s = self._token_s / self._tokens
        own = self._shares.get(client.name)
        grows = (self._expected_beside(client, own) + _BASE) / (self._beside / self._tokens + _BASE)
        first_token_s = own.first_token_s if own is not None and own.in_flight else 0.0
        takes_s = first_token_s + self._expected(max_tokens) * per_token_s * grows
        over_s = _MARGIN * takes_s - left_s
        return None if over_s <= 0 else min(max(over_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    def _expected_beside(self, client: Client, own: _Share | None) -> float:
        """The number of generations that compete with a new one of the client, which is included."""
        count = 1 + (own.in_flight if own is not None else 0)
        per_weight = count / client.policy.weight
        others = (share for share in self._shares.values() if share is not own and share.in_flight)
        return count + sum(max(share.answering, min(share.in_flight, per_weight * share.weight)) for share in others)

    def _expected(self, max_tokens: int) -> int:
        if len(self._lengths) < _FEW_LENGTHS:
            return min(max_tokens, max(self._lengths, default=max_tokens))
        return min(max_tokens, sorted(self._lengths)[int(_LONG * len(self._lengths))])

    def _forget(self, now: float) -> None:
        kept = math.exp(min(0.0, self._as_of - now) / _MEMORY_S)
        self._as_of = now
        self._tokens *= kept
        self._token_s *= kept
        self._beside *= kept


class RefusalPace:
    """When refusals are sent: at once up to a burst of one second, beyond that at a fixed rate.

    If that would exceed a caller's remaining time, the refusal is held back for most of that time, some longer than
    others: callers that were refused together return one by one. A busy process ends a delay late, and was late to see
    the request: twice the mean of that lag is left out.
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._turn = 0.0  # Of one; evenly spread for any number of turns.
        self._lag_s = 0.0

    def held(self, late_s: float) -> None:
        """Records that a delay ended late."""
        self._lag_s += _LAG_WEIGHT * (max(0.0, late_s) - self._lag_s)

    def hold_s(self, left_s: float, now: float) -> float:
        """How long to hold back a refusal whose caller's deadline has so many seconds left."""
        due = max(self._due, now - 1.0) + 1 / _REFUSALS_PER_S
        self._due = min(due, now + _LONGEST_HOLD_S)
        self._turn = (self._turn + _GOLDEN_RATIO) % 1.0
        most_s = min(_LONGEST_HOLD_S, _SHARE_OF_LEFT * (left_s - 2 * self._lag_s)) * (1 - _SPREAD * self._turn)
        return max(0.0, min(due - now, most_s))
