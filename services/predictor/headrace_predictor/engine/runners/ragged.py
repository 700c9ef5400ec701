"""Attention of a decoder's tokens to ranges of their own sequences' blocks.

A sequence's ids are prompt, decoder start token, output. Its blocks hold keys and values of each at its position: for
the prompt those that cross-attention reads, computed once by the encoder, for the rest those of the decoder's
self-attention. Both have the same size, and nothing is stored elsewhere: the blocks that the scheduler counts are all
the memory in use, and a step can be repeated, whatever its rows.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.runners.attention import attend_rows
from headrace_predictor.engine.state.attention import Range, Scores
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, KeyValueCache
from headrace_predictor.engine.state.sequence import Row, Sequence

_COPIED_TOKENS = 64  # The number of tokens whose blocks are copied at a time if there is no kernel.


class RaggedAttention:
    """The attention of all layers that share these heads; `bias`, `scale` and cap as in `Scores`.

    They are the same in each call for a layer that writes, and for one that does not.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._kernels: dict[tuple[int, bool], kernel.Attention] = {}

    def __call__(
        self,
        layer: int,
        looks_at: Range,
        query: Tensor,
        written: tuple[Tensor, Tensor] | None = None,
        *,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        """Output [tokens, heads x head size] of queries [tokens, heads, head size].

        `written`, keys and values, are stored at each range's last position. `softcap` bounds scores.
        """
        scores = Scores(scale, softcap or 0.0, bias=bias)
        if not kernel.takes(query):
            if written is not None:
                last = looks_at.ends.long() - 1
                block = looks_at.table[looks_at.owners.long(), last // BLOCK_TOKENS].long()
                self._cache.write(layer, (block, last % BLOCK_TOKENS), *written)
            return self._in_copies(layer, looks_at, query, scores)
        packed = query if written is None else torch.cat((query, *written), dim=1)
        attend = self._kernels.get((layer, written is None))
        if attend is None:
            attend = kernel.Attention(query.shape[1], scores)
            self._kernels[layer, written is None] = attend
        return attend(self._cache.arrays[layer], looks_at, packed, kernel.Buffer(query.shape, query.dtype))

    def _in_copies(self, layer: int, looks_at: Range, query: Tensor, scores: Scores) -> Tensor:
        """The same in plain torch, from copies of the blocks, a bounded number at a time."""
        outputs = []
        position = torch.arange(looks_at.table.shape[1] * BLOCK_TOKENS, device=query.device)[None]
        for part in range(0, len(query), _COPIED_TOKENS):
            some = slice(part, part + _COPIED_TOKENS)
            keys, values = self._cache.read(layer, looks_at.table[looks_at.owners[some].long()])
            firsts, ends = looks_at.firsts[some, None], looks_at.ends[some, None]
            mask = ((position >= firsts) & (position < ends))[:, None, None]
            output = attend_rows(query[some, :, None], keys, values, mask, scores, looks_at.ends[some, None])
            outputs.append(output[:, :, 0].flatten(1))
        return torch.cat(outputs)


def decoder_ids(row: Row) -> list[int]:
    """The ids of a row that the decoder computes: those behind the prompt."""
    return row.sequence.ids[max(row.start, len(row.sequence.input_ids)) : row.start + row.count]


def ranges_of(cache: KeyValueCache, rows: Rows[Row]) -> tuple[Range, Range]:
    """What the decoder's tokens of packed rows attend to: the prompt, and the ids behind it up to their own."""
    table = np.zeros((len(rows), max(len(row.sequence.blocks) for row in rows)), dtype=np.int32)
    prompts = [len(row.sequence.input_ids) for row in rows]
    counts, ends = [], list[int]()
    for row, own, prompt in zip(rows, table, prompts, strict=True):
        own[: len(row.sequence.blocks)] = row.sequence.blocks
        begin, end = max(row.start, prompt), row.start + row.count
        counts.append(end - begin)
        ends += range(begin + 1, end + 1)
    cache.expect(int(table.max()))
    owners = np.arange(len(rows)).repeat(counts)
    blocks, owner, prompt_end, end_ = (
        torch.from_numpy(np.asarray(array, dtype=np.int32)).to(cache.device)
        for array in (table, owners, np.repeat(prompts, counts), ends)
    )
    return Range(blocks, owner, torch.zeros_like(prompt_end), prompt_end), Range(blocks, owner, prompt_end, end_)


def prompt_places(sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The block of each prompt token, and its offset there."""
    count = len(sequence.input_ids)
    return np.array(sequence.blocks).repeat(BLOCK_TOKENS)[:count], np.arange(count) % BLOCK_TOKENS


def relative_biases(decoder: object) -> list[Tensor]:
    """The bias of each layer of T5's kind, float32 [heads, distances]: the furthest first, constant beyond it."""
    biases: list[Tensor] = []
    for block in decoder.block:  # type: ignore[attr-defined]
        attention = block.layer[0].SelfAttention
        if attention.has_relative_attention_bias:
            distances = attention.relative_attention_max_distance + 1
            bias = attention.compute_bias(1, distances, past_seen_tokens=distances - 1)
            biases.append(bias[0, :, 0].float().contiguous())
        else:
            # In T5 all layers share the first layer's; in UMT5 each has its own.
            biases.append(biases[-1])
    return biases
