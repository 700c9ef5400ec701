"""Paged attention behind transformers' AttentionInterface, which every layer of a paged model calls, and its input.

The tokens of a step are packed into one row [1, T]: first those of `decodes` sequences that compute one id each, then
chunks of prompts. The step's plan, the model's keyword argument `step_plan`, has the sequence of each token, and the
blocks of its keys and values; everything is in tensors with fixed meanings, so that a recorded decode pass can be
replayed with other contents.

A layer writes the keys and values of the step's tokens to their blocks, at places given by position, so a step can be
repeated. Then each token's query attends to its own sequence's blocks: with the compiled kernel if it supports the
device and dtype, otherwise in plain torch, which runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace_predictor.engine.adapters import AdaptedTokens, Adapter
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.kernel import Ranges
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, KeyValueCache
from headrace_predictor.engine.state.sequence import Row

_T = TypeVar("_T")

NAME = "headrace_paged"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(frozen=True)
class Chunk:
    """Tokens `at` to `at + count` of the packed row, positions from `start` on of the table's row `owner`."""

    owner: int
    at: int
    count: int
    start: int


@dataclass(frozen=True)
class StepPlan:
    """Passed to the attention of every layer; what layers derive from it is derived once."""

    cache: KeyValueCache
    decodes: int
    chunks: list[Chunk]
    table: Tensor  # int32 [sequences, blocks of the longest], padded with block 0.
    owners: Tensor  # int32 [T], each token's row of the table.
    ends: Tensor  # int32 [T], each token's position + 1: it attends to positions before that.
    adapted: Sequence[AdaptedTokens] = ()  # The tokens that have adapters.
    _derived: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def firsts(self, reach: Reach) -> Tensor:
        """The first position [T] that each token attends to."""
        return self._once(("firsts", reach), lambda: reach.firsts(self.ends - 1))

    def ranges(self, reach: Reach) -> Ranges:
        """What each token attends to, for the compiled kernel."""
        return self._once(("ranges", reach), lambda: Ranges.of(self.table, self.owners, self.firsts(reach), self.ends))

    def places(self) -> tuple[Tensor, Tensor]:
        """The block [T] of each token's own keys and values, and the offset [T] in it."""
        position = self._once(("position",), lambda: self.ends.long() - 1)
        block = self._once(("block",), lambda: self.table[self.owners.long(), position // BLOCK_TOKENS].long())
        return block, self._once(("offset",), lambda: position % BLOCK_TOKENS)

    def decode_mask(self, reach: Reach) -> Tensor:
        """The positions in its blocks that each decoding row attends to: [decodes, 1, 1, tokens]."""
        return self._once(("decodes", reach), lambda: self._mask(slice(0, self.decodes), self.table.shape[1], reach))

    def chunk_mask(self, chunk: Chunk, reach: Reach) -> Tensor:
        """The positions in its blocks that each token of a chunk attends to: [1, 1, chunk, tokens]."""
        tokens = slice(chunk.at, chunk.at + chunk.count)
        blocks = -(-(chunk.start + chunk.count) // BLOCK_TOKENS)
        return self._once((chunk, reach), lambda: self._mask(tokens, blocks, reach).permute(1, 2, 0, 3))

    def _mask(self, tokens: slice, blocks: int, reach: Reach) -> Tensor:
        positions = torch.arange(blocks * BLOCK_TOKENS, device=self.ends.device)[None]
        mask = (positions < self.ends[tokens, None]) & (positions >= self.firsts(reach)[tokens, None])
        return mask[:, None, None]

    def _once(self, key: tuple[object, ...], derive: Callable[[], _T]) -> _T:
        if key not in self._derived:
            self._derived[key] = derive()
        derived: _T = self._derived[key]
        return derived


class StepPlanner:
    """Creates plans; keeps the table of running sequences between steps, because it hardly changes."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[list[int]] = []  # The blocks in each of its rows.

    def plan(self, rows: Rows[Row], adapted: Sequence[AdaptedTokens] = ()) -> StepPlan:
        """The plan for rows, of which those with one id come first; `adapted`: see `adapted_tokens`."""
        decodes = sum(row.count == 1 for row in rows)
        chunks = []
        owners = list(range(decodes))
        ends = [row.start + 1 for row in rows[:decodes]]
        for owner, row in enumerate(rows[decodes:], decodes):
            chunks.append(Chunk(owner, len(ends), row.count, row.start))
            owners += [owner] * row.count
            ends += range(row.start + 1, row.start + row.count + 1)
        table = self._blocks(rows, -(-max(ends) // BLOCK_TOKENS))
        self._cache.expect(int(table.max()))
        tensors = self._tensor(table), self._tensor(owners), self._tensor(ends)
        return StepPlan(self._cache, decodes, chunks, *tensors, adapted)

    def _tensor(self, values: list[int] | NDArray[np.int32]) -> Tensor:
        # numpy reads a list in half of torch's time.
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self._cache.device)

    def _blocks(self, rows: Rows[Row], width: int) -> NDArray[np.int32]:
        if self._table.shape[0] < len(rows) or self._table.shape[1] < width:
            # Twice the needed size, so that it rarely grows.
            self._table = np.zeros((2 * len(rows), 2 * width), dtype=np.int32)
            self._filled = [[]] * (2 * len(rows))
        for i, row in enumerate(rows):
            blocks = row.sequence.blocks[: self._table.shape[1]]
            # After a preemption any block may differ.
            if self._filled[i] != blocks:
                self._table[i] = 0
                self._table[i, : len(blocks)] = blocks
                self._filled[i] = blocks
        return np.ascontiguousarray(self._table[: len(rows), :width])


def adapted_tokens(rows: Rows[Row]) -> list[AdaptedTokens]:
    """The tokens of packed rows that have adapters; those of neighbouring rows with the same one are together."""
    adapted: list[AdaptedTokens] = []
    at = 0
    for row in rows:
        adapter: Adapter | None = row.sequence.adapter
        end = at + row.count
        if adapter is not None:
            begin = at
            if adapted and adapted[-1].adapter is adapter and adapted[-1].end == at:
                begin = adapted.pop().begin
            adapted.append(AdaptedTokens(adapter, begin, end))
        at = end
    return adapted


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    step_plan: StepPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query [1, heads, T, head size] to output [1, T, heads, head size], as the interface requires."""
    if step_plan is None:
        raise ValueError("paged attention needs a step plan")
    if unknown := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach: Reach = module.reach  # type: ignore[assignment]  # Not `sliding_window`: some families only have the mask.
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = _attend_compiled if kernel.takes(queries) else _attend_in_copies
    return attend(step_plan, layer, queries, keys, values, scale, reach)[None], None


def _attend_compiled(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach
) -> Tensor:
    """Output [T, heads, head size]."""
    packed = torch.cat((queries, keys, values), dim=1)
    attend = kernel.Attention(queries.shape[1], keys.shape[1], scale)
    output = kernel.Buffer(queries.shape, queries.dtype)
    return attend(plan.cache.arrays[layer], plan.ranges(reach), packed, output).view(queries.shape)


def _attend_in_copies(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach
) -> Tensor:
    """Output [T, heads, head size], from copies of the blocks."""
    plan.cache.write(layer, plan.places(), keys, values)
    outputs = []
    if decodes := plan.decodes:
        read_keys, read_values = plan.cache.read(layer, plan.table[:decodes])
        grouped = queries[:decodes].reshape(decodes, keys.shape[1], -1, queries.shape[-1])
        scores = torch.matmul(grouped, read_keys).float() * scale
        weights = scores.masked_fill(~plan.decode_mask(reach), -torch.inf).softmax(-1).to(values.dtype)
        outputs.append(torch.matmul(weights, read_values).view_as(queries[:decodes]))
    outputs += [_prefill(plan, layer, chunk, queries, scale, reach) for chunk in plan.chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _prefill(plan: StepPlan, layer: int, chunk: Chunk, queries: Tensor, scale: float, reach: Reach) -> Tensor:
    """Output [tokens, heads, head size] of a chunk whose keys and values are already in the cache."""
    blocks = -(-(chunk.start + chunk.count) // BLOCK_TOKENS)
    keys, values = plan.cache.read(layer, plan.table[chunk.owner : chunk.owner + 1, :blocks])
    query = queries[chunk.at : chunk.at + chunk.count].transpose(0, 1)[None]
    group = query.shape[1] // keys.shape[1]
    keys = keys.transpose(2, 3)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    mask = plan.chunk_mask(chunk, reach)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)[0].transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
