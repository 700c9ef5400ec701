"""Recorded decode passes: on CUDA, launching its many small kernels dominates a step; a graph launches all at once.

A pass is recorded at start for each bucket of rows, with the choice of tokens: of the likeliest, and of drawn ones. It
reads and writes buffers at fixed addresses: the tokens that it chooses are the ids of the next one. A step copies only
what differs: the ends of its tokens, changed rows of the table, and ids unless the pass before left them. Rows that
only pad a bucket read and write block 0, which no sequence owns. The recorded code is the code that runs without
graphs; `record` is a parameter so that buckets and buffers can be tested without a GPU.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.gpu import Attend
from headrace_predictor.engine.runners.attention import BlockTable, StepPlan
from headrace_predictor.engine.sampling.sampler import choose
from headrace_predictor.engine.state.cache import KeyValueCache, on_device
from headrace_predictor.engine.state.sequence import Row

Forward = Callable[[Tensor, Tensor, StepPlan], Tensor]
Record = Callable[[Callable[[], None]], Callable[[], None]]

_TOLERANCE = 0.05  # Of the logits' size: libraries may choose other products.
_NOTHING: list[int] = []  # The blocks of a row that pads.


def row_bucket(rows: int) -> int:
    """The rows of the pass that serves `rows` rows: powers of two up to 16, then multiples of 8, then of 16."""
    step = 8 if rows <= 32 else 16
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // step) * step


def cuda_recorder() -> Record:
    """A function that records the kernels which another one launches; what it returns launches them again.

    It raises where the host waits for the device: after an error within a recording torch's allocator would not
    recover. All graphs share one pool of memory, the largest is to be first.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # cuBLAS keeps memory for each.

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda.set_sync_debug_mode("error")
            try:
                compute()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # Whatever happens it is the current one again.
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            compute()
        return graph.replay

    return record


class DecodeGraphs:
    """Passes of `forward(ids [1, rows], positions [1, rows], plan)` for up to `rows` rows of up to `blocks` blocks.

    Raises AssertionError if a recorded pass has other numbers than the same pass without a recording.
    """

    def __init__(
        self, forward: Forward, cache: KeyValueCache, attend: Attend | None, rows: int, blocks: int, record: Record
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._attend = attend
        self.rows = rows
        most, device = row_bucket(rows), cache.device
        self._tokens = torch.zeros(most, dtype=torch.long, device=device)  # Those of a pass, the ids of the next one.
        self._ends = torch.ones(most, dtype=torch.int32, device=device)
        self._owners = torch.arange(most, dtype=torch.int32, device=device)
        self._table = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._host_table = BlockTable()
        self._drawn = torch.zeros(2, most, dtype=torch.float64, device=device)  # Temperatures, uniform numbers.
        self._logits = self._forward_of(most).clone()  # Of all passes: those of each would take as much memory again.
        keys = {(row_bucket(count), draws) for count in range(1, rows + 1) for draws in (True, False)}
        self.passes = {key: record(partial(self._compute, *key)) for key in sorted(keys, reverse=True)}
        for key in (max(keys), min(keys)):
            self._check(*key)

    def run(self, rows: Rows[Row], ids: Tensor, drawn: Rows[tuple[float, float]] = ()) -> tuple[Tensor, Tensor]:
        """Computes rows with one of `ids` [rows] each; the logits [rows, vocabulary], and the tokens [rows] chosen.

        Both are overwritten by the next pass. `ids` may be such tokens. `drawn`: temperatures and uniform numbers;
        where the temperature is 0, and without them, the likeliest token is chosen.
        """
        count, device = len(rows), self._cache.device
        bucket = row_bucket(count)
        padding = bucket - count
        blocks = [row.sequence.blocks for row in rows] + [_NOTHING] * padding
        if changed := self._host_table.fill(blocks, self._table.shape[1]):
            width = max(1, *(len(blocks[i]) for i in changed))  # What is beyond the ends of a row is never read.
            contents = on_device(self._host_table.array[changed, :width], np.int32, device)
            self._table[:, :width].index_copy_(0, on_device(changed, np.int64, device), contents)
        self._ends[:bucket] = on_device([row.start + 1 for row in rows] + [1] * padding, np.int32, device)
        self._tokens[:count] = ids  # torch copies nothing to its own place.
        draws = any(temperature for temperature, _ in drawn)
        if draws:
            self._drawn[:, :count] = on_device(drawn, np.float64, device).T
        self.passes[bucket, draws]()
        return self._logits[:count], self._tokens[:count]

    def _forward_of(self, rows: int) -> Tensor:
        # A plan caches derived tensors, so each pass needs its own.
        ends = self._ends[:rows]
        plan = StepPlan(self._cache, rows, [], self._table[:rows], self._owners[:rows], ends, attend=self._attend)
        return self._forward(self._tokens[None, :rows].clamp(min=0), (ends.long() - 1)[None], plan)

    def _compute(self, rows: int, draws: bool) -> None:
        logits = self._logits[:rows].copy_(self._forward_of(rows))
        self._tokens[:rows] = choose(logits, *(self._drawn[:, :rows] if draws else ()))

    def _check(self, rows: int, draws: bool) -> None:
        logits = []
        for compute in (self.passes[rows, draws], partial(self._compute, rows, draws)):
            self._tokens.zero_()
            compute()
            logits.append(self._logits[:rows].clone())
        most, fault = _TOLERANCE * float(logits[1].abs().max()), f"a recorded pass of {rows} rows has other logits"
        torch.testing.assert_close(*logits, rtol=0, atol=most, msg=fault)
