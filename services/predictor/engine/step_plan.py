"""What a step's attention needs to know: which tokens are whose, and in which blocks their keys and values lie.

The tokens of a step are packed into one row [1, T]: first those of `decodes` sequences that compute
one id each, then chunks of prompts. The decode part is tensors of fixed meaning (table, lengths), so
that a recorded pass can be fed with other contents.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.predictor.engine.cache import KeyValueCache
from services.predictor.engine.sequence import Row


@dataclass(frozen=True)
class Chunk:
    """Ids of one sequence: positions `start` to `start + count` in it, `at` on in the packed row."""

    at: int
    count: int
    start: int
    blocks: Tensor  # int64, those that hold the sequence up to the chunk's end.


@dataclass(frozen=True)
class StepPlan:
    """Handed to every layer's attention. `written` are block and offset [T] of each token of the chunks."""

    cache: KeyValueCache
    decodes: int
    table: Tensor  # int32 [decodes, blocks of the longest], filled up with block 0.
    lengths: Tensor  # int32 [decodes], counting the token that is computed.
    chunks: list[Chunk]
    written: tuple[Tensor, Tensor]
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def chunk_mask(self, chunk: Chunk, window: int) -> Tensor:
        """Which of the sequence's tokens [chunk, sequence] each token of the chunk looks at."""
        key = (chunk.start, chunk.count, window)
        if key not in self._masks:
            device = chunk.blocks.device
            queries = torch.arange(chunk.start, chunk.start + chunk.count, device=device)[:, None]
            keys = torch.arange(chunk.start + chunk.count, device=device)[None]
            mask = keys <= queries
            self._masks[key] = mask & (keys > queries - window) if window else mask
        return self._masks[key]

    def decode_mask(self, window: int) -> Tensor:
        """Which of the table's tokens [decodes, tokens] each decoding row looks at."""
        key = (-1, -1, window)
        if key not in self._masks:
            tokens = torch.arange(self.table.shape[1] * self.cache.block_tokens, device=self.table.device)[None]
            lengths = self.lengths[:, None]
            mask = tokens < lengths
            self._masks[key] = mask & (tokens >= lengths - window) if window else mask
        return self._masks[key]


class StepPlanner:
    """Makes plans; keeps the table of running sequences between steps, since it hardly changes."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[tuple[int, int]] = []

    def plan(self, rows: Rows[Row]) -> StepPlan:
        """The plan of rows of which those with one id come first."""
        device = self._cache.device
        decodes = [row for row in rows if row.count == 1]
        chunks = []
        at = len(decodes)
        size = self._cache.block_tokens
        blocks: list[int] = []
        offsets: list[int] = []
        for row in rows[at:]:
            end = row.start + row.count
            held = row.sequence.blocks[: -(-end // size)]
            chunks.append(Chunk(at, row.count, row.start, torch.tensor(held, device=device)))
            blocks += [held[position // size] for position in range(row.start, end)]
            offsets += [position % size for position in range(row.start, end)]
            at += row.count
        lengths = [row.start + 1 for row in decodes]
        return StepPlan(
            self._cache,
            len(decodes),
            self._decode_table(decodes, -(-max(lengths, default=0) // size)).to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            chunks,
            (torch.tensor(blocks, device=device), torch.tensor(offsets, device=device)),
        )

    def _decode_table(self, decodes: list[Row], width: int) -> Tensor:
        if self._table.shape[0] < len(decodes) or self._table.shape[1] < width:
            # Twice as large as needed, so that it grows rarely.
            self._table = np.zeros((2 * len(decodes), 2 * width), dtype=np.int32)
            self._filled = [(-1, 0)] * (2 * len(decodes))
        for i, row in enumerate(decodes):
            sequence = row.sequence
            state = (sequence.number, sequence.blocks[-1] if sequence.blocks else 0)
            if self._filled[i] != state or len(sequence.blocks) > width:
                held = sequence.blocks[:width]
                self._table[i] = 0
                self._table[i, : len(held)] = held
                self._filled[i] = state
        return torch.from_numpy(np.ascontiguousarray(self._table[: len(decodes), :width]))
