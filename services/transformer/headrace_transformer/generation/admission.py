"""Admission of generations: those that are expected to end within their deadline.

A generation that would end too late is refused before any work is done (load_estimate.py), but never because of another
client's queue. A refusal may be delayed, see `RefusalPace`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from headrace.clients import Client
from headrace.errors import OverloadedError
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.load_estimate import LoadEstimate, RefusalPace
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.shares import account_of
from headrace_transformer.models.models import TextModel

_HELD = 0.9, 1.5  # A gap between these multiples of a pace's interval is the pace's doing.


class Admission:
    """Owned by the event loop; one for all requests."""

    def __init__(self) -> None:
        self._loads: dict[str, LoadEstimate] = {}  # By model.
        self._pace = RefusalPace()

    @contextmanager
    def admitted(self, request: TextRequest, model: TextModel) -> Iterator[AdmittedGeneration]:
        """Counts the generation in the block, or raises OverloadedError."""
        load = self._loads.setdefault(model.name, LoadEstimate())
        now, given = time.monotonic(), request.sampling.get("max_tokens")
        max_tokens = given if isinstance(given, int) else request.default_max_tokens or model.limits.default_tokens(0)
        client = account_of(request.call)
        retry_after_s = load.retry_after_s(request.call.deadline.at - now, max_tokens, now, client)
        if retry_after_s is not None:
            message = "too many requests are in progress to answer this one before its deadline"
            raise OverloadedError(message, retry_after_ms=int(1000 * retry_after_s))
        load.began(client)
        generation = AdmittedGeneration(load, client, request.call.arrived, _pace_of(request.sampling))
        try:
            yield generation
        finally:
            generation.end()

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


class AdmittedGeneration:
    """One generation, as its model's load estimate sees it; gaps as long as its pace do not show the model's speed."""

    def __init__(self, load: LoadEstimate, client: Client, arrived: float, pace: float = 0.0) -> None:
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

    def end(self) -> None:
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
