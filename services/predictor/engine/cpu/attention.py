"""Attention over paged keys and values, compiled for the CPU by Numba.

torch has no such operation: it needs a sequence's blocks in one tensor. That copy and a batch of tiny matrix products
cost several times as much as reading the cache once (two thirds of the time of an OPT-125M step of 32 rows).

Every token is computed separately and always in the same order, so its result is the same to the last bit, whatever
else is in the step and however its sequence is divided into chunks.

Shapes, with T tokens in the step: packed [T, query heads, then key heads, then value heads, head size], of which keys
and values are written to the cache first; or queries only, if nothing is written. Cosines and sines [T, head size] of
the rotary position embedding of queries and keys, [0, 0] for none. The cache's keys [blocks, heads, head size,
BLOCK_TOKENS] and values [blocks, heads, BLOCK_TOKENS, head size]. The output [T, query heads, head size]. table int32
[sequences, blocks of the longest]; owners int32 [T], each token's row of the table; firsts and ends int32 [T], the
range of positions that a token attends to, its own being ends - 1 if keys are written; both ascend along the tokens of
a sequence. bias float32 [query heads, n] is added to scores by distance, the furthest first; it is constant from
distance n - 1 on; [query heads, 0] for none. Values at or beyond a tile's end are never read.

Rotation is that of transformers' `apply_rotary_pos_emb`: it pairs each number with the one half a head further on.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
from numba import njit, prange

from services.predictor.engine.cpu.vectors import add_weighted_rows, exp, narrow, widen
from services.predictor.engine.state.cache import BLOCK_TOKENS

_TILE_TOKENS = 8  # Tokens that read the cache together: neighbours in a prompt attend to nearly the same positions.

_THREADS = threading.Lock()
numba.config.THREADING_LAYER = "workqueue"  # The only layer without a system library.

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3e38)

# Without Python's checks: the caller constructs the shapes, so no exception can occur.
_OPTIONS = {"nogil": True, "error_model": "numpy", "cache": True}
# Sums in the order written here, for every caller: so results are the same everywhere.
_EXACT = {"fastmath": {"contract", "nsz"}, **_OPTIONS}
# Lanes may reorder a row's maximum and sum: the order then depends only on the row's range.
_BY_LANES = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, **_OPTIONS}


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _turn(source: Any, cosines: Any, sines: Any, factor: Any, target: Any) -> None:
    """Multiplies a head [head size] by a factor and, if there are cosines, rotates it; float32."""
    if len(cosines) == 0:
        for d in range(len(target)):
            target[d] = widen(source[d]) * factor
        return
    half = len(target) // 2
    for d in range(half):
        near, far = widen(source[d]), widen(source[d + half])
        target[d] = (near * widen(cosines[d]) - far * widen(sines[d])) * factor
        target[d + half] = (far * widen(cosines[d + half]) + near * widen(sines[d + half])) * factor


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _write(
    packed: Any, cosines: Any, sines: Any, keys: Any, values: Any, table: Any, owners: Any, ends: Any, query_heads: Any
) -> None:
    """Writes all keys and values before any is read: a token attends to earlier tokens, also to those of this step."""
    tokens, all_heads, size = packed.shape
    heads = (all_heads - query_heads) // 2
    key = np.empty(size, np.float32)
    for i in range(tokens):
        position = ends[i] - 1
        block, offset = table[owners[i], position // BLOCK_TOKENS], position % BLOCK_TOKENS
        row = i if len(cosines) else 0
        for h in range(heads):
            _turn(packed[i, query_heads + h], cosines[row], sines[row], _ONE, key)
            value = packed[i, query_heads + heads + h]
            for d in range(size):
                keys[block, h, d, offset] = narrow(key[d], value[d])
                values[block, h, offset, d] = value[d]


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _score(query: Any, key: Any, scores: Any) -> None:
    """Scores [BLOCK_TOKENS] of one query [head size] with a block's keys [head size, BLOCK_TOKENS]."""
    for t in range(BLOCK_TOKENS):
        scores[t] = _ZERO
    add_weighted_rows(query, key, scores)


@njit(**_BY_LANES)  # type: ignore[untyped-decorator]
def _normalise(scores: Any, first: Any, end: Any, bias: Any) -> None:
    """Turns scores into weights that sum to one over [first, end) and are zero elsewhere."""
    furthest = len(bias) - 1
    if furthest >= 0:
        near = max(first, end - 1 - furthest)
        for t in range(first, near):
            scores[t] += bias[0]
        for t in range(near, end):
            scores[t] += bias[t - end + 1 + furthest]
    highest = _LOWEST
    for t in range(first, end):
        highest = max(highest, scores[t])
    total = _ZERO
    for t in range(first, end):
        weight = exp(scores[t] - highest)
        scores[t] = weight
        total += weight
    inverse = _ONE / total
    for t in range(first, end):
        scores[t] *= inverse
    for t in range(first // BLOCK_TOKENS * BLOCK_TOKENS, first):
        scores[t] = _ZERO
    for t in range(end, (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
        scores[t] = _ZERO


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _attend_tile(
    packed: Any,
    cosines: Any,
    sines: Any,
    keys: Any,
    values: Any,
    blocks: Any,
    firsts: Any,
    ends: Any,
    bias: Any,
    scale: Any,
    out: Any,
) -> None:
    """Attends for neighbouring tokens of one sequence, whose blocks are `blocks`."""
    tokens, query_heads, size = out.shape
    heads = keys.shape[1]
    group = query_heads // heads
    alone = tokens * group == 1
    # Both ends of the range ascend along the tokens.
    first_block, end_block = firsts[0] // BLOCK_TOKENS, (ends[tokens - 1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    wide = np.empty((tokens, query_heads, size), np.float32)
    scores = np.empty((tokens, query_heads, end_block * BLOCK_TOKENS), np.float32)
    sums = np.zeros((tokens, query_heads, size), np.float32)
    # Blocks are copied once for several queries.
    key = np.empty((size, BLOCK_TOKENS), np.float32)
    value = np.empty((BLOCK_TOKENS, size), np.float32)

    for i in range(tokens):
        for a in range(query_heads):
            row = i if len(cosines) else 0
            _turn(packed[i, a], cosines[row], sines[row], scale, wide[i, a])
    for b in range(first_block, end_block):
        start = b * BLOCK_TOKENS
        for h in range(heads):
            stored = keys[blocks[b], h]
            if alone:
                _score(wide[0, h], stored, scores[0, h, start : start + BLOCK_TOKENS])
                continue
            for d in range(size):
                for t in range(BLOCK_TOKENS):
                    key[d, t] = widen(stored[d, t])
            for i in range(tokens):
                if start < ends[i] and start + BLOCK_TOKENS > firsts[i]:
                    for a in range(h * group, (h + 1) * group):
                        _score(wide[i, a], key, scores[i, a, start : start + BLOCK_TOKENS])
    for i in range(tokens):
        for a in range(query_heads):
            _normalise(scores[i, a], firsts[i], ends[i], bias[a])
    for b in range(first_block, end_block):
        start = b * BLOCK_TOKENS
        used = min(BLOCK_TOKENS, ends[tokens - 1] - start)
        for h in range(heads):
            stored = values[blocks[b], h]
            if alone:
                add_weighted_rows(scores[0, h, start : start + used], stored[:used], sums[0, h])
                continue
            for t in range(used):
                for d in range(size):
                    value[t, d] = widen(stored[t, d])
            for i in range(tokens):
                if start < ends[i] and start + BLOCK_TOKENS > firsts[i]:
                    for a in range(h * group, (h + 1) * group):
                        add_weighted_rows(scores[i, a, start : start + used], value[:used], sums[i, a])
    for i in range(tokens):
        for a in range(query_heads):
            for d in range(size):
                out[i, a, d] = narrow(sums[i, a, d], out[i, a, d])


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _tiles(owners: Any) -> Any:
    """The indices at which runs of at most _TILE_TOKENS neighbours with one owner begin, and the end of the last."""
    begins = np.empty(len(owners) + 1, np.int64)
    count = 0
    for i in range(len(owners)):
        if i == 0 or owners[i] != owners[i - 1] or i - begins[count - 1] == _TILE_TOKENS:
            begins[count] = i
            count += 1
    begins[count] = len(owners)
    return begins[: count + 1]


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_in_turn(
    packed: Any,
    cosines: Any,
    sines: Any,
    keys: Any,
    values: Any,
    table: Any,
    owners: Any,
    firsts: Any,
    ends: Any,
    bias: Any,
    scale: Any,
    out: Any,
) -> None:
    _write(packed, cosines, sines, keys, values, table, owners, ends, out.shape[1])
    tiles = _tiles(owners)
    for n in range(len(tiles) - 1):
        i, j = tiles[n], tiles[n + 1]
        turning = slice(i, j) if len(cosines) else slice(0, 1)
        _attend_tile(
            *(packed[i:j], cosines[turning], sines[turning], keys, values, table[owners[i]]),
            *(firsts[i:j], ends[i:j], bias, scale, out[i:j]),
        )


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_in_parallel(
    packed: Any,
    cosines: Any,
    sines: Any,
    keys: Any,
    values: Any,
    table: Any,
    owners: Any,
    firsts: Any,
    ends: Any,
    bias: Any,
    scale: Any,
    out: Any,
) -> None:
    _write(packed, cosines, sines, keys, values, table, owners, ends, out.shape[1])
    tiles = _tiles(owners)
    for n in prange(len(tiles) - 1):
        i, j = tiles[n], tiles[n + 1]
        turning = slice(i, j) if len(cosines) else slice(0, 1)
        _attend_tile(
            *(packed[i:j], cosines[turning], sines[turning], keys, values, table[owners[i]]),
            *(firsts[i:j], ends[i:j], bias, scale, out[i:j]),
        )


def attend(threads: int, *arguments: Any) -> None:
    """Computes all tokens with `threads` threads; see the module for the arguments, the last of which is the output."""
    if threads == 1:
        _attend_in_turn(*arguments)
    else:
        # Numba's thread pool serves one caller at a time.
        with _THREADS:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _attend_in_parallel(*arguments)
