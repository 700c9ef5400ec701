"""Stand-ins for models: the rest of every test is real."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from services.predictor.engine.interface import EngineLimits
from services.predictor.engine.row_engine import RowEngine
from services.predictor.engine.scheduler import Scheduler
from services.predictor.engine.sequence import Sequence

VOCABULARY = 64
END = 2


def logits_after(ids: list[int]) -> Tensor:
    """Logits that depend on every id so far: a model's essence, without the model."""
    state = 7
    for token in ids:
        state = (state * 31 + token + 1) % 1_000_003
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(state)) * 2


class FakeRunner:
    """Counts its calls; `before` runs at the start of each, and may wait or raise."""

    def __init__(self, before: Callable[[Sequence], None] = lambda _: None) -> None:
        self.calls: dict[str, int] = {}
        self._before = before

    def logits(self, sequence: Sequence) -> Tensor:
        self._before(sequence)
        self.calls[sequence.request.id] = self.calls.get(sequence.request.id, 0) + 1
        logits = logits_after([*sequence.request.input_ids, *sequence.output_ids])
        logits[END] = -torch.inf
        return logits


class Gate:
    """Lets the model make a token each time it is opened."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)

    def open(self, tokens: int = 1) -> None:
        self._permits.release(tokens)

    def __call__(self, _: Sequence) -> None:
        if not self._permits.acquire(timeout=30):
            raise TimeoutError("nobody opened the gate")


def make_engine(
    runner: FakeRunner, max_running: int = 8, max_waiting: int = 8, cache_tokens: int = 100_000
) -> RowEngine:
    limits = EngineLimits(1024, False, VOCABULARY)
    return RowEngine("fake", runner, Scheduler(max_running, max_waiting, cache_tokens), limits, {END})
