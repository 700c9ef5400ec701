"""Runs decoders whose attention is their own: one forward pass for all sequences that compute one id.

To the model, such a step is a batch of `generate`: rows padded on the left with a mask, and a cache of transformers'
interface. This one writes a row's keys and values to the slots of its sequence's blocks, and returns copies of all of
the row's, at the right of the padding. Each chunk of a prompt is a pass of its own, without padding. `proof.py`
verifies at load that this is right for the model.
"""

import inspect
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, GrowingMemory
from headrace_predictor.engine.state.sequence import Row

_SHORT = 128


class BatchedRunner(ModelRunner):
    """See the module. `blocks` is the size of the cache, with the reserved block."""

    description = "batched"
    reuses_prefixes = True
    scores_prompts = True

    def __init__(self, model: Any, blocks: int) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._pools = _Pools(blocks, model.device)

    def run(self, rows: Rows[Row]) -> Tensor:
        sampled: dict[int, Tensor] = {}
        scored: dict[int, Tensor] = {}
        alone = [(i,) for i, row in enumerate(rows) if row.count > 1]
        for numbers in [*alone, *_alike(rows)]:
            logits = self._pass([rows[i] for i in numbers])
            for i, own in zip(numbers, logits, strict=True):
                if rows[i].samples:
                    sampled[i] = own[-1:]
                if scores := rows[i].scores:
                    scored[i] = own[scores.start - rows[i].start : scores.stop - rows[i].start]
        wanted = [part[i] for part in (sampled, scored) for i in sorted(part)]
        return torch.cat(wanted) if wanted else torch.empty(0)

    def clear(self, blocks: Rows[int]) -> None:
        self._pools.clear(blocks)

    def _pass(self, rows: Rows[Row]) -> Tensor:
        """Logits [rows, n, vocabulary] of rows with one count of ids: of the last ids if only these are wanted."""
        count = rows[0].count
        ends = [row.start + count for row in rows]
        longest = max(ends)
        slots = np.zeros((len(rows), longest), dtype=np.int64)
        for own, row, end in zip(slots, rows, ends, strict=True):
            positions = np.arange(end)
            blocks = np.array(row.sequence.blocks)
            own[longest - end :] = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        arguments: dict[str, Any] = {}
        if min(ends) < longest:
            arguments["attention_mask"] = self._tensor([[0] * (longest - end) + [1] * end for end in ends])
        if "position_ids" in self._takes:
            arguments["position_ids"] = self._tensor([[*range(end - count, end)] for end in ends])
        if "logits_to_keep" in self._takes and not any(row.scores for row in rows):
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(
            input_ids=self._tensor([row.ids for row in rows]),
            past_key_values=_PassCache(self._pools, self._tensor(slots), count),
            use_cache=True,
            **arguments,
        ).logits
        return logits

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._model.device)


def _alike(rows: Rows[Row]) -> list[tuple[int, ...]]:
    """The numbers of rows with one id, in groups of which none has a row of more than twice another's length.

    Each row is padded to the longest of its group. Lengths up to `_SHORT` are alike.
    """
    groups: list[list[int]] = []
    shortest = 0
    for i in sorted((i for i, row in enumerate(rows) if row.count == 1), key=lambda i: rows[i].start):
        if not groups or rows[i].start >= 2 * max(shortest, _SHORT):
            groups.append([])
            shortest = rows[i].start
        groups[-1].append(i)
    return [tuple(group) for group in groups]


class _Pools:
    """Keys and values of each layer [slots, heads, head size], of the sizes and the dtype that the model gives."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self._slots = blocks * BLOCK_TOKENS
        self._device = device
        self._pools: dict[int, list[Tensor]] = {}

    def of(self, layer: int, *stored: Tensor) -> list[Tensor]:
        """The pools of a layer, whose keys and values are [rows, heads, tokens, size]."""
        if layer not in self._pools:
            self._pools[layer] = [self._make(tensor) for tensor in stored]
        return self._pools[layer]

    def clear(self, blocks: Rows[int]) -> None:
        """Zeroes blocks in all layers."""
        for pool in (pool for pools in self._pools.values() for pool in pools):
            pool.view(-1, BLOCK_TOKENS, *pool.shape[1:])[list(blocks)] = 0

    def _make(self, stored: Tensor) -> Tensor:
        shape = self._slots, stored.shape[1], stored.shape[3]
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=stored.dtype, device=self._device)
        return GrowingMemory(int(np.prod(shape)) * stored.dtype.itemsize).tensor(shape, stored.dtype)


class _PassCache:
    """The interface of transformers' `Cache` for one pass, in which rows have `count` new tokens each.

    `slots` [rows, tokens] are those of each row's tokens, with padding on the left; new tokens are at the right.
    """

    is_compileable = False

    def __init__(self, pools: _Pools, slots: Tensor, count: int) -> None:
        self._pools = pools
        self._slots = slots
        self._length = slots.shape[1]
        self._count = count
        self._written = slots[:, -count:].flatten()
        self._places: dict[int, Tensor] = {}  # By the number of heads, those of each row's heads in all tokens.

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [rows, heads, count, size]; returns all [rows, heads, tokens, size]."""
        whole = []
        for pool, new in zip(self._pools.of(layer_idx, keys, values), (keys, values), strict=True):
            pool[self._written] = new.transpose(1, 2).flatten(0, 1)
            # Contiguous as the model multiplies them, which would copy them once more.
            places = self._of_heads(pool.shape[1])
            copies = pool.flatten(0, 1).index_select(0, places.flatten())
            whole.append(copies.view(*places.shape, -1))
        return whole[0], whole[1]

    def _of_heads(self, heads: int) -> Tensor:
        if heads not in self._places:
            numbers = torch.arange(heads, device=self._slots.device)[:, None]
            self._places[heads] = self._slots[:, None] * heads + numbers
        return self._places[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens before the new ones, padding included."""
        return self._length - self._count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length - self._count

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of tokens that `update` returns, and the first one's position."""
        return self._length, 0
