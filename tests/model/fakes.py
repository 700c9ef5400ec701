"""Fake models; everything else in the tests is real."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.errors import DeadlineError, HopBrokenError, NotReadyError, RequestFailedError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.interface import Chunk, EngineLimits
from headrace_predictor.engine.load import PrefillPace
from headrace_predictor.engine.sampling.sampler import sample
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Row, SamplingRow
from headrace_predictor.engine.state.slot import MergingSlot
from tests.support.in_process_engine import submit
from tests.support.requests import request

__all__ = ["request"]

VOCABULARY = 64
END = 2
BLOCK_TOKENS = 4


def logits_after(ids: list[int]) -> Tensor:
    """Logits that depend on every id so far, as a model's do. They never end a sequence."""
    state = 7
    for token in ids:
        state = (state * 31 + token + 1) % 1_000_003
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(state)) * 2
    logits[END] = -torch.inf
    return logits


class FakeRunner:
    """A paged model whose keys and values are the ids themselves.

    It writes the ids of a step to their blocks and reads a sequence only from its blocks, so
    blocks that are shared wrongly or lost change its logits. `before` runs for each row, and may wait
    or raise; `calls` counts the tokens computed for each request.
    """

    description = "fake"
    start_ids: tuple[int, ...] = ()
    scores_prompts = False

    def __init__(
        self, before: Callable[[Row], None] = lambda _: None, blocks: int = 25_000, reuses_prefixes: bool = True
    ) -> None:
        self.reuses_prefixes = reuses_prefixes
        self.memory = [[-1] * BLOCK_TOKENS for _ in range(blocks)]
        self.calls: dict[str, int] = {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self._before = before

    def run(self, rows: Rows[Row]) -> Tensor:
        self.steps.append([(row.sequence.id, row.start, row.count) for row in rows])
        logits = []
        for row in rows:
            self._before(row)
            sequence, end = row.sequence, row.start + row.count
            self.calls[sequence.id] = self.calls.get(sequence.id, 0) + row.count
            for position in range(row.start, end):
                block = sequence.blocks[position // BLOCK_TOKENS]
                self.memory[block][position % BLOCK_TOKENS] = sequence.ids[position]
            if row.samples:
                held = [self.memory[sequence.blocks[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(end)]
                logits.append(self.logits(held))
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY)

    def logits(self, ids: list[int]) -> Tensor:
        return logits_after(ids)

    def clear(self, blocks: Rows[int]) -> None:
        for block in blocks:
            self.memory[block] = [-1] * BLOCK_TOKENS

    def probe(self) -> None:
        """Always succeeds, unless a test replaces it."""


class Gate:
    """Lets the model compute a row each time the gate is opened."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)

    def open(self, rows: int = 1) -> None:
        self._permits.release(rows)

    def __call__(self, _: Row) -> None:
        if not self._permits.acquire(timeout=30):
            raise TimeoutError("the gate was not opened")


def make_engine(
    runner: Any,
    max_running: int = 8,
    max_waiting: int = 8,
    step_tokens: int = 64,
    step_timeout_s: float = 60,
    grammars: GrammarCompiler | None = None,
) -> ContinuousBatchingEngine:
    scheduler = Scheduler(
        BlockManager(len(runner.memory), BLOCK_TOKENS), max_running, max_waiting, step_tokens, runner.reuses_prefixes
    )
    limits = EngineLimits(1024, False, VOCABULARY, getattr(runner, "scores_prompts", False))
    pace = PrefillPace(max_gap_s=0.06)
    return ContinuousBatchingEngine("fake", runner, scheduler, pace, limits, {END}, step_timeout_s, grammars=grammars)


@contextmanager
def engines(
    make_one: Callable[..., ContinuousBatchingEngine] = make_engine,
) -> Iterator[Callable[..., ContinuousBatchingEngine]]:
    """Makes engines as `make_one` does, and closes them at the end."""
    made = []

    def make(*arguments: Any, **limits: Any) -> ContinuousBatchingEngine:
        made.append(make_one(*arguments, **limits))
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.close()


async def read_all(slot: MergingSlot) -> tuple[list[int], list[Chunk]]:
    """Every id of a request, and the chunks they came in; fails if nothing arrives for long."""
    ids: list[int] = []
    chunks: list[Chunk] = []
    while True:
        chunk = await slot.read()
        chunks.append(chunk)
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            return ids, chunks


def expected(prompt: Rows[int], count: int = 12, **parameters: Any) -> list[int]:
    """The ids that `FakeRunner` gives a request that runs alone."""
    ids: list[int] = []
    for _ in range(count):
        logits = logits_after([*prompt, *ids])
        row = SamplingRow(SamplingParameters(**{"seed": 3, **parameters}), list(prompt), ids, frozenset({END}))
        ids.append(sample(logits[None], [row]).token_ids[0])
    return ids


CROWD = [(i, i + 1, i + 2, i + 3, i + 4) for i in range(3, 12)]


async def dead(engine):
    assert await asyncio.to_thread(engine.wait_for_death, 30)
    with pytest.raises(NotReadyError):
        submit(engine, request("late"))


async def outcome(slot):
    """The outcome of a request: its ids, or the class of its error."""
    try:
        return (await read_all(slot))[0]
    except (RequestFailedError, HopBrokenError, NotReadyError, DeadlineError) as error:
        return type(error)


def submit_crowd(engine, **parameters):
    return [submit(engine, request(str(i), prompt=prompt, **parameters)) for i, prompt in enumerate(CROWD)]


async def assert_crowd_is_unharmed(slots, **parameters):
    for prompt, slot in zip(CROWD, slots, strict=True):
        assert (await read_all(slot))[0] == expected(prompt, **parameters)
