"""Recorded decode passes: on CUDA, launching its many small kernels dominates a step; a graph launches all at once.

A pass is recorded for each bucket of rows and of blocks for each row, over buffers at fixed addresses; a step copies
its contents in and replays. Rows that only pad a bucket read and write block 0, which no sequence owns. The recorded
code is the code that runs without graphs; `record` is a parameter so that buckets and buffers can be tested without a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.state.cache import KeyValueCache

Forward = Callable[[Tensor, Tensor, StepPlan], Tensor]
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

_WARM_UPS = 2  # Libraries choose algorithms and allocate in their first calls, which must not be recorded.


def row_bucket(rows: int) -> int:
    """The rows of the pass that serves `rows` rows: powers of two up to 16, then multiples of 8, then of 16."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    return -(-rows // 8) * 8 if rows <= 32 else -(-rows // 16) * 16


def block_bucket(blocks: int) -> int:
    """The blocks for each row of the pass that serves `blocks` blocks: powers of two."""
    return 1 << (max(1, blocks) - 1).bit_length()


def record_cuda_graph(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Records the kernels that `forward` launches; the returned function launches them again, into the same output."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@dataclass(frozen=True)
class _Pass:
    """One recorded pass and the buffers that it reads."""

    ids: Tensor
    positions: Tensor
    table: Tensor
    ends: Tensor
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """Passes of `forward(ids [1, rows], positions [1, rows], plan)`, each recorded at its first use."""

    def __init__(self, forward: Forward, cache: KeyValueCache, record: Record = record_cuda_graph) -> None:
        self._forward = forward
        self._cache = cache
        self._record = record
        self._passes: dict[tuple[int, int], _Pass] = {}

    def run(self, ids: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """Logits [rows, vocabulary] of a plan without chunks; the next run overwrites them."""
        rows, blocks = plan.table.shape
        key = row_bucket(rows), block_bucket(blocks)
        if key not in self._passes:
            self._passes[key] = self._make(*key)
        recorded = self._passes[key]
        for buffer, filler in ((recorded.table, 0), (recorded.ends, 1), (recorded.ids, 0), (recorded.positions, 0)):
            buffer.fill_(filler)
        recorded.table[:rows, :blocks] = plan.table
        recorded.ends[:rows] = plan.ends
        recorded.ids[:, :rows] = ids
        recorded.positions[:, :rows] = positions
        return recorded.replay()[:rows]

    def _make(self, rows: int, blocks: int) -> _Pass:
        device = self._cache.device
        ids, positions = (torch.zeros(1, rows, dtype=torch.long, device=device) for _ in range(2))
        table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        owners = torch.arange(rows, dtype=torch.int32, device=device)
        ends = torch.ones(rows, dtype=torch.int32, device=device)

        def forward() -> Tensor:
            # A plan caches derived tensors, so each pass needs its own.
            plan = StepPlan(self._cache, rows, [], table, owners, ends)
            return self._forward(ids, positions, plan)

        return _Pass(ids, positions, table, ends, self._record(forward))
