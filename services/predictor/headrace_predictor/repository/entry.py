"""A model that is, was or will be loaded, as the repository knows it."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from headrace.models.sources import ModelSource
from headrace_predictor.repository.lease import Serving
from headrace_predictor.repository.loading import FetchedModel

_STEADY_S = 30.0  # After a run of this length the next start is immediate.
_AT_ONCE = 3
_FIRST_S = 0.5
_LONGEST_S = 30.0


class Backoff:
    """When an engine that has ended is started again: at once, then with growing delays.

    Counts failed starts and short runs of one model's engine.
    """

    def __init__(self) -> None:
        self._short_lives = 0
        self._failures = 0
        self._started_at: float | None = None

    def started(self) -> None:
        """The engine serves."""
        self._started_at = time.monotonic()
        self._failures = 0

    def failed(self) -> None:
        """It could not be started."""
        self._failures += 1

    def delay_s(self) -> float:
        """Seconds to wait before the next start."""
        if self._started_at is not None:
            is_steady = time.monotonic() - self._started_at >= _STEADY_S
            self._short_lives = 0 if is_steady else self._short_lives + 1
            self._started_at = None
        doublings = self._failures + max(0, self._short_lives - _AT_ONCE)
        return min(_LONGEST_S, _FIRST_S * 2.0 ** (doublings - 1)) if doublings else 0.0


class State(StrEnum):
    """The states of Triton's repository extension."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class IndexRow(NamedTuple):
    name: str
    state: State
    reason: str


@dataclass(eq=False)
class Entry:
    """`expected`: nothing is ready without it. `fetched`: the files of the served or last served model.

    `base`: of an adapter that is loaded or being loaded, the entry of its base.
    """

    source: ModelSource
    state: State
    reason: str = ""
    expected: bool = False
    serving: Serving | None = None
    fetched: FetchedModel | None = None
    base: "Entry | None" = None
    watch: asyncio.Task[None] | None = None
    backoff: Backoff = field(default_factory=Backoff)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held by the task that changes the entry.

    def set(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason

    def report(self, progress: str) -> None:
        """Shows how far a load is."""
        if self.state is State.LOADING:
            self.reason = progress

    async def unwatch(self) -> None:
        """Ends the task that replaces the model's engine."""
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
            self.watch = None
