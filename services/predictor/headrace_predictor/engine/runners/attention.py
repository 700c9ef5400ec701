"""Paged attention behind transformers' AttentionInterface, which every layer of a paged model calls, and its input.

The tokens of a step are packed into one row [1, T]: first those of `decodes` sequences that compute one id each, then
chunks of prompts. The step's plan, in a context variable, has the sequence of each token, and the blocks of its keys
and values; everything is in tensors with fixed meanings, so that a recorded decode pass can be
replayed with other contents.

A layer writes the keys and values of the step's tokens to their blocks, at places given by position, so a step can be
repeated. Then each token's query attends to its own sequence's blocks: with the GPU's kernel or the processor's, where
they support the device and dtype, otherwise in plain torch, which runs anywhere, from copies of the blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from headrace_predictor.engine.adapters import AdaptedTokens, Adapter
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.recording import launch
from headrace_predictor.engine.gpu import Attend
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.state.attention import Range, Scores
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, KeyValueCache, on_device
from headrace_predictor.engine.state.sequence import Row

_T = TypeVar("_T")

NAME = "headrace_paged"
_UNSUPPORTED = ("position_bias", "head_mask")


# Not an argument: not every model passes those that it does not know down to its layers.
_CURRENT: "ContextVar[StepPlan]" = ContextVar("step plan")


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
    attend: Attend | None = None  # The GPU's kernel.
    _derived: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @contextmanager
    def current(self) -> Iterator[None]:
        """During the block, the layers of a model compute this step."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def firsts(self, reach: Reach) -> Tensor:
        """The first position [T] that each token attends to."""
        return self._once(("firsts", reach), lambda: reach.firsts(self.ends - 1))

    def tokens(self, reach: Reach) -> Range:
        """What each token attends to, for the kernels."""
        return self._once(
            ("tokens", reach),
            lambda: Range(self.table, self.owners, self.firsts(reach), self.ends, self.decodes, self.tiles),
        )

    def tiles(self, most: int) -> Tensor:
        """Where tiles of up to `most` tokens begin, see `Range`."""

        def divided() -> Tensor:
            if not self.chunks:  # A recorded pass may not read the host's memory.
                return torch.arange(self.decodes + 1, dtype=torch.int32, device=self.ends.device)
            begins = (at for chunk in self.chunks for at in range(chunk.at, chunk.at + chunk.count, most))
            return on_device([*range(self.decodes), *begins, len(self.ends)], np.int32, self.ends.device)

        return self._once(("tiles", most), divided)

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


def current_plan() -> StepPlan:
    """The plan of the step that a model computes; LookupError without one."""
    return _CURRENT.get()


class BlockTable:
    """A table of blocks that is kept between steps, because it hardly changes; grows as needed."""

    def __init__(self) -> None:
        self.array = np.zeros((0, 0), dtype=np.int32)  # [rows, blocks], padded with block 0.
        self._filled: list[tuple[list[int], int]] = []  # The blocks in each of its rows.

    def fill(self, rows: Rows[list[int]], width: int = 0) -> list[int]:
        """Fills its first rows with blocks; returns those that changed. It gets at least `width` columns.

        A sequence's list only grows; after a preemption, when any block may differ, it has another.
        """
        if self.array.shape[0] < len(rows) or self.array.shape[1] < width:
            # Twice the needed size, so that it rarely grows.
            self.array = np.zeros((2 * len(rows), 2 * width), dtype=np.int32)
            self._filled = [([], 0)] * (2 * len(rows))
        changed = []
        for i, blocks in enumerate(rows):
            if self._filled[i][0] is not blocks or self._filled[i][1] != len(blocks):
                used = blocks[: self.array.shape[1]]
                self.array[i] = 0
                self.array[i, : len(used)] = used
                self._filled[i] = blocks, len(blocks)
                changed.append(i)
        return changed


class StepPlanner:
    """Creates plans."""

    def __init__(self, cache: KeyValueCache, attend: Attend | None = None) -> None:
        self._cache = cache
        self._attend = attend
        self._table = BlockTable()

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
        width = -(-max(ends) // BLOCK_TOKENS)
        self._table.fill([row.sequence.blocks for row in rows], width)
        table = np.ascontiguousarray(self._table.array[: len(rows), :width])
        self._cache.expect(int(table.max()))
        tensors = self._tensor(table), self._tensor(owners), self._tensor(ends)
        return StepPlan(self._cache, decodes, chunks, *tensors, adapted, self._attend)

    def _tensor(self, values: list[int] | NDArray[np.int32]) -> Tensor:
        return on_device(values, np.int32, self._cache.device)


class PackedPositions:
    """In place of a cache of transformers, for models that ask one how many tokens precede those of a pass."""

    def __init__(self, plan: StepPlan) -> None:
        self._ends = plan.ends

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """For each token of the step [T], its position less its place: models add the place."""
        return self._ends.long() - 1 - torch.arange(len(self._ends), device=self._ends.device)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns what is given: `paged_attention` stores it."""
        return keys, values


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Query [1, heads, T, head size] to output [1, T, heads, head size], as the interface requires."""
    if unknown := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    scores = Scores(
        query.shape[-1] ** -0.5 if scaling is None else scaling, others.get("softcap") or 0.0, others.get("s_aux")
    )
    return attend(module, query, key, value, scores), None


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Output [1, T, heads, value size] for queries [1, heads, T, head size]; the module has `layer_idx` and `reach`."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # Not `sliding_window`: some families only have the mask.
    plan, layer, reach = current_plan(), module.layer_idx, module.reach
    if plan.attend is not None:
        plan.cache.write(layer, plan.places(), keys, values)  # type: ignore[arg-type]
        memory = plan.cache.keys[layer], plan.cache.values[layer]  # type: ignore[index]
        output = plan.attend(queries, *memory, plan.tokens(reach), scores)  # type: ignore[arg-type]
    else:
        output = queries.new_empty((*queries.shape[:2], values.shape[2]))
        launch(_attend_now, output, layer, reach, queries, keys, values, scores)
    return output[None]


def _attend_now(output: Tensor, layer: int, reach: Reach, *parts: Any) -> None:
    """Writes the output [T, heads, value size] of the current step."""
    queries, _, values, _ = parts
    compute = _attend_compiled if kernel.takes(queries) and kernel.takes(values) else _attend_in_copies
    output.copy_(compute(current_plan(), layer, reach, *parts))


def _attend_compiled(
    plan: StepPlan, layer: int, reach: Reach, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Output [T, heads, value size]."""
    parts = queries, keys, values
    if keys.shape[2] == values.shape[2]:
        packed = torch.cat(parts, dim=1)
    else:
        packed = torch.cat([heads.flatten(1) for heads in parts], dim=1)
    weigh = kernel.Attention(queries.shape[1], scores)
    output = kernel.Buffer((*queries.shape[:2], values.shape[2]), queries.dtype)
    return weigh(plan.cache.arrays[layer], plan.tokens(reach), packed, output).view(output.array.shape)


def _attend_in_copies(
    plan: StepPlan, layer: int, reach: Reach, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Output [T, heads, value size], from copies of the blocks."""
    plan.cache.write(layer, plan.places(), keys, values)
    outputs = []
    if decodes := plan.decodes:
        copies = plan.cache.read(layer, plan.table[:decodes])
        mask = plan.decode_mask(reach)
        ends = plan.ends[:decodes, None]
        outputs.append(attend_rows(queries[:decodes, :, None], *copies, mask, scores, ends)[:, :, 0])
    for chunk in plan.chunks:
        blocks = -(-(chunk.start + chunk.count) // BLOCK_TOKENS)
        copies = plan.cache.read(layer, plan.table[chunk.owner : chunk.owner + 1, :blocks])
        tokens = slice(chunk.at, chunk.at + chunk.count)
        query, mask = queries[tokens].transpose(0, 1)[None], plan.chunk_mask(chunk, reach)
        outputs.append(attend_rows(query, *copies, mask, scores, plan.ends[None, tokens])[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores, ends: Tensor) -> Tensor:
    """Output [rows, heads, n, value size] for queries [rows, heads, n, head size], with copies of blocks.

    `ends` [rows, n]: the position after each query's own.
    """
    rows, heads, count, size = query.shape
    group = heads // keys.shape[1]
    if count > 1 and not scores.cap and scores.sinks is None and scores.bias is None:
        keys = keys.transpose(2, 3)
        if group > 1:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scores.scale)
    # The queries of a group are rows of one product, the group before the positions.
    products = torch.matmul(query.reshape(rows, -1, group * count, size), keys)
    products = products.to(torch.promote_types(products.dtype, torch.float32)) * scores.scale
    weights = products.view(rows, heads, count, -1)
    if scores.cap:
        weights = scores.cap * torch.tanh(weights / scores.cap)
    added = scores.added(keys.shape[-1], ends)
    weights = (weights if added is None else weights + added).masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[None, :, None, None].expand(rows, -1, count, 1)
        weights = torch.cat((weights, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = weights.softmax(-1)
    output = torch.matmul(weights.to(values.dtype).reshape(rows, -1, group * count, weights.shape[-1]), values)
    return output.view(rows, heads, count, -1)


AttentionInterface.register(NAME, paged_attention)
