"""A model that is, was or will be loaded, as the repository knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from headrace.models.sources import ModelSource
from headrace_predictor.repository.backoff import Backoff
from headrace_predictor.repository.lease import Serving
from headrace_predictor.repository.loading import FetchedModel


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
    base: Entry | None = None
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
