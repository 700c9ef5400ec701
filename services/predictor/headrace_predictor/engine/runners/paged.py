"""Runs any decoder of transformers that takes an attention function, by itself or by own_attention.py: one forward pass
for all rows of a step.

Tokens of all rows are packed into one row of ids with explicit positions; only `attention.py` knows where one sequence
ends and the next begins. `proof.py` verifies at load that this is right for the model.
"""

from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.adapters import AdapterHooks, Adapters
from headrace_predictor.engine.gpu import Operations
from headrace_predictor.engine.runners.attention import NAME, PackedPositions, StepPlan, StepPlanner, adapted_tokens
from headrace_predictor.engine.runners.decode_graphs import DecodeGraphs, Record
from headrace_predictor.engine.runners.gpu_decoder import GpuDecoder
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.engine.runners.streamed import StreamedDecoder, unlike_gated
from headrace_predictor.engine.sampling.sampler import choose_each, uniform
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache, on_device
from headrace_predictor.engine.state.sequence import Row, detached_sequence

_FEW_TOKENS = 16  # Of a pass that is recorded: with more the products take most of the time.
_TRIED = 8  # Ids of the test whether logits are exact: a model may have few positions.


class PagedRunner(ModelRunner):
    """See the module. `blocks` is the size of the cache, with the reserved block."""

    description = "paged"
    reuses_prefixes = True
    scores_prompts = True

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        blocks: int,
        adapters: Adapters | None = None,
        rotary: SequenceRotary | None = None,
        streamed: StreamedDecoder | None = None,
        tells_positions: bool = False,
        operations: Operations | None = None,
    ) -> None:
        """After `find_reaches`. With `tells_positions`, the model gets positions by `PackedPositions` too.

        `operations`: the GPU's kernels.
        """
        self._adapters = adapters
        self._model = model
        # Before the cache takes the rest of the memory; in a proof in wider numbers than the model's.
        self._gpu = None
        if operations is not None and unlike_gated(model) is None:
            self._gpu = GpuDecoder(model, operations, shape.dtype)
        self._cache = KeyValueCache(shape, blocks, model.device)
        self._attend = None if operations is None else operations.attend
        self._planner = StepPlanner(self._cache, self._attend)
        self.streamed = streamed
        self._tells_positions = tells_positions
        self._rotary = rotary
        self.repeats = streamed is None and rotary is None and not tells_positions
        self.scaling = None if rotary is None else rotary.scaling
        self._graphs: DecodeGraphs | None = None
        self._hooks = AdapterHooks(model)
        model.set_attn_implementation(NAME)

    def record(self, record: Record, rows: int, context: int) -> int:
        """Records the decode passes of up to `rows` rows of contexts so long; returns their number.

        Only of a runner that `chooses`: else a pass would repeat the factors of its first rows' positions, or copies.
        """
        blocks = -(-context // BLOCK_TOKENS)
        self._graphs = DecodeGraphs(self._forward, self._cache, self._attend, rows, blocks, record)
        return len(self._graphs.passes)

    @property
    def chooses(self) -> bool:
        """Whether `choose` is right and pays: on a GPU with kernels."""
        return self._attend is not None and self._rotary is None

    def choose(self, rows: Rows[Row], tokens: Tensor | None = None) -> Tensor:
        """Computes rows with one id each, and chooses their tokens [rows] on the device, until the next call.

        `tokens`: the rows' ids, where the host does not know them yet: those that the last call chose, or some of them.
        The parameters are plain. On CUDA nothing waits for the device.
        """
        parameters = [row.sequence.sampling for row in rows]
        positions = [row.start + 1 - len(row.sequence.ids) + len(row.sequence.output_ids) for row in rows]
        is_filtered = any(one.is_filtered for one in parameters)
        drawn = [
            (0.0, 0.0) if one.is_greedy or is_filtered else (one.temperature, uniform(one.seed or 0, position))
            for one, position in zip(parameters, positions, strict=True)
        ]
        logits, chosen = self._decode(rows, tokens, drawn)
        return choose_each(logits, parameters, positions) if is_filtered or chosen is None else chosen

    def run(self, rows: Rows[Row]) -> Tensor:
        numbers = self._adapter_numbers(rows)
        decodes = all(row.count == 1 and row.samples for row in rows)
        if decodes and not numbers:
            return self._decode(rows)[0]
        # The planner takes rows with one id first, and the tokens of an adapter are computed together; the returned
        # logits are in the caller's order.
        order = sorted(range(len(rows)), key=lambda i: (rows[i].count > 1, numbers.get(i, 0)))
        packed = [rows[i] for i in order]
        ids: list[int] = []
        positions: list[int] = []
        sampled: dict[int, Rows[int]] = {}
        scored: dict[int, Rows[int]] = {}
        for i, row in zip(order, packed, strict=True):
            if scores := row.scores:
                scored[i] = [len(ids) + position - row.start for position in scores]
            ids += row.ids
            positions += range(row.start, row.start + row.count)
            if row.samples:
                sampled[i] = range(len(ids) - 1 - len(row.proposed), len(ids))
        plan = self._planner.plan(packed, adapted_tokens(packed) if numbers else ())
        tensors = self._tensor([ids]), self._tensor([positions])
        places = [place for wanted in (sampled, scored) for i in sorted(wanted) for place in wanted[i]]
        return self._forward_rows(packed, *tensors, plan, self._tensor(places))

    def _adapter_numbers(self, rows: Rows[Row]) -> dict[int, int]:
        """The numbers of the adapters of rows that have one, by the row's index."""
        if self._adapters is None or not self._adapters.is_used:
            return {}
        return {i: adapter.number for i, row in enumerate(rows) if (adapter := row.sequence.adapter) is not None}

    def _decode(
        self, rows: Rows[Row], tokens: Tensor | None = None, drawn: Rows[tuple[float, float]] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of rows with one id, `tokens` or their last, and the tokens that a recorded pass has chosen."""
        ids = self._tensor([row.sequence.ids[row.start] for row in rows]) if tokens is None else tokens
        if self._graphs is not None and len(rows) <= self._graphs.rows:
            return self._graphs.run(rows, ids, drawn)
        positions = self._tensor([[row.start for row in rows]])
        return self._forward_rows(rows, ids.clamp(min=0)[None], positions, self._planner.plan(rows)), None

    def _forward_rows(
        self, rows: Rows[Row], ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None
    ) -> Tensor:
        if self._rotary is None:
            return self._forward(ids, positions, plan, places)
        with self._rotary.packed(rows):
            return self._forward(ids, positions, plan, places)

    def _forward(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all."""
        if self.streamed is not None:
            return self.streamed(ids, positions, plan, places)
        if self._gpu is not None and not plan.adapted:
            return self._gpu(ids, positions, plan, places)
        if plan.adapted:
            with self._hooks.adding(plan.adapted):
                return self._call(plan, ids, positions, places)
        if self.passes is not None and ids.numel() <= _FEW_TOKENS:
            inputs = (ids, positions) if places is None else (ids, positions, places)
            with plan.current():
                return self.passes.run(tuple(map(Tensor.numel, inputs)), partial(self._call, plan), *inputs)
        return self._call(plan, ids, positions, places)

    def _call(self, plan: StepPlan, ids: Tensor, positions: Tensor, places: Tensor | None = None) -> Tensor:
        with plan.current():
            logits: Tensor = self._model(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                past_key_values=PackedPositions(plan) if self._tells_positions else None,
                logits_to_keep=0 if places is None else places,  # 0 means all.
            ).logits[0]
        return logits

    def _tensor(self, values: list[Any]) -> Tensor:
        return on_device(values, np.int64, self._cache.device)

    def clear(self, blocks: Rows[int]) -> None:
        self._cache.clear(blocks)

    def is_exact(self) -> bool:
        """Whether logits are the same for an id of its own and for one among others of its sequence."""
        if self.streamed:
            return True  # By construction.
        if self._cache.device.type != "cpu" or self.scaling is not None:
            return False
        ids = [i % self._model.get_input_embeddings().num_embeddings for i in range(_TRIED)]
        sequence = detached_sequence(ids[:1])
        sequence.blocks = [0]
        together = self.run([Row(sequence, 0, _TRIED, ids[1:])])
        for position in reversed(range(_TRIED)):
            sequence.ids = ids[: position + 1]
            if not torch.equal(together[position], self.run([Row(sequence, position, 1)])[0]):
                return False
        return True
