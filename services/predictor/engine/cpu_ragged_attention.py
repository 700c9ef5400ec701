"""Attention of single queries, each over a range of its own sequence's tokens, compiled for the CPU by Numba.

For decoders whose sequences lie in the cache one part behind the other (prompt, then output), and
whose scores get a bias by distance (T5's) in place of a scale.

Shapes: query and output [tokens, heads, head size]; key and value [tokens, heads, head size], which
are written to the cache first, or [0, heads, head size] where there is nothing to write; the cache's
keys [blocks, heads, head size, BLOCK_TOKENS] and values [blocks, heads, BLOCK_TOKENS, head size];
table int32 [tokens, blocks of the longest sequence]; firsts and ends int32 [tokens], the range of
positions that a token looks at, its own being the last; bias float32 [heads, n], n - 1 being the
distance from which on it stays the same, the furthest first. Either all float32, or all bfloat16
given as their bits, uint16; sums are float32. Each token is computed by itself, so its result does not
depend on the batch, and of the values none outside its range is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from services.predictor.engine.cpu_attention import BLOCK_TOKENS, _exp, _narrow, _widen

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3e38)
_UNROLL = 8  # The head size must be a multiple of it.


def _attend(
    query: Any, key: Any, value: Any, keys: Any, values: Any, table: Any, firsts: Any, ends: Any, bias: Any, out: Any
) -> None:
    """See the module."""
    tokens, heads, size = query.shape
    furthest = bias.shape[1] - 1

    # All before any is read: a token looks at those before it, which may be of the same step.
    for i in range(key.shape[0]):
        block, offset = table[i, (ends[i] - 1) // BLOCK_TOKENS], (ends[i] - 1) % BLOCK_TOKENS
        for h in range(heads):
            for d in range(size):
                keys[block, h, d, offset] = key[i, h, d]
                values[block, h, offset, d] = value[i, h, d]

    for i in prange(tokens):
        first, end = firsts[i], ends[i]
        first_block, end_block = first // BLOCK_TOKENS, (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        near = max(first, end - 1 - furthest)
        scores = np.empty(end_block * BLOCK_TOKENS, np.float32)
        wide = np.empty(size, np.float32)
        sums = np.empty(size, np.float32)
        for h in range(heads):
            for d in range(size):
                wide[d] = _widen(query[i, h, d])

            for b in range(first_block, end_block):
                k = keys[table[i, b], h]
                s = scores[b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]
                for t in range(BLOCK_TOKENS):
                    s[t] = _ZERO
                for d in range(0, size, _UNROLL):
                    for t in range(BLOCK_TOKENS):
                        s[t] += (
                            wide[d] * _widen(k[d, t])
                            + wide[d + 1] * _widen(k[d + 1, t])
                            + wide[d + 2] * _widen(k[d + 2, t])
                            + wide[d + 3] * _widen(k[d + 3, t])
                            + wide[d + 4] * _widen(k[d + 4, t])
                            + wide[d + 5] * _widen(k[d + 5, t])
                            + wide[d + 6] * _widen(k[d + 6, t])
                            + wide[d + 7] * _widen(k[d + 7, t])
                        )

            for t in range(first, near):
                scores[t] += bias[h, 0]
            for t in range(near, end):
                scores[t] += bias[h, t - end + 1 + furthest]
            highest = _LOWEST
            for t in range(first, end):
                highest = max(highest, scores[t])
            total = _ZERO
            for t in range(first, end):
                weight = _exp(scores[t] - highest)
                scores[t] = weight
                total += weight

            for d in range(size):
                sums[d] = _ZERO
            for b in range(first_block, end_block):
                v = values[table[i, b], h]
                start = b * BLOCK_TOKENS
                low, high = max(first, start) - start, min(end, start + BLOCK_TOKENS) - start
                whole = low + (high - low) // 4 * 4
                for t in range(low, whole, 4):
                    for d in range(size):
                        sums[d] += (
                            scores[start + t] * _widen(v[t, d])
                            + scores[start + t + 1] * _widen(v[t + 1, d])
                            + scores[start + t + 2] * _widen(v[t + 2, d])
                            + scores[start + t + 3] * _widen(v[t + 3, d])
                        )
                for t in range(whole, high):
                    for d in range(size):
                        sums[d] += scores[start + t] * _widen(v[t, d])
            inverse = _ONE / total
            for d in range(size):
                out[i, h, d] = _narrow(sums[d] * inverse, query[i, h, d])


# Without the checks of Python's semantics; no exception can arise from shapes that the caller has made.
_OPTIONS = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "nogil": True,
    "error_model": "numpy",
    "cache": True,
}

attend = njit(**_OPTIONS)(_attend)
attend_in_parallel = njit(parallel=True, **_OPTIONS)(_attend)
