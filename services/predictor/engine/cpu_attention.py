"""Attention over paged keys and values, compiled for the CPU by Numba.

torch has no such operation: it needs the blocks copied together first, and the copy and a batch of
tiny matrix products cost several times what reading the cache once does (an OPT-125M step of 32 rows
spent two thirds of its time there).

Every token is computed by itself and always in the same order, so its result does not depend, to the
last bit, on what else is in the step or on how its sequence was cut into chunks.

Shapes, T being the step's tokens: query and output [T, query heads, head size]; key and value, which
are written to the cache first, [T, heads, head size], or [0, heads, head size] where nothing is to be
written; the cache's keys [blocks, heads, head size, BLOCK_TOKENS] and values [blocks, heads,
BLOCK_TOKENS, head size]. table int32 [sequences, blocks of the longest]; owners int32 [T], each token's
row of it; firsts and ends int32 [T], the range of positions that a token looks at, its own being
ends - 1 where keys are written; both ascend along the tokens of a sequence. bias float32 [query heads,
n] is added to scores: n - 1 is the distance from which on it stays the same, the furthest first; [query
heads, 0] for none. Either all float32, or all bfloat16 given as their bits, uint16; sums are float32. Of
values none at or beyond a tile's end is read.

exp is 2^n times a polynomial of degree 6 (Cody and Waite's reduction), within 2e-7 of the true value.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from services.predictor.engine.cache import BLOCK_TOKENS

_TILE_TOKENS = 8  # So many read the cache together: a prompt's tokens look at nearly the same.
_UNROLL = 8  # The head size must be a multiple of it.

_THREADS = threading.Lock()
numba.config.THREADING_LAYER = "workqueue"  # The one that needs no library of the system.

_WORD = ir.IntType(32)
_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3e38)
_HALF = np.float32(0.5)
_LOG2_E = np.float32(1.4426950408889634)
_SMALLEST_EXPONENT = np.float32(-126)
_C6 = np.float32(1.535336188319500e-4)
_C5 = np.float32(1.339887440266574e-3)
_C4 = np.float32(9.618437357674640e-3)
_C3 = np.float32(5.550332471162809e-2)
_C2 = np.float32(2.402264791363012e-1)
_C1 = np.float32(6.931472028550421e-1)


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def _widen(typing_context: Any, stored: Any) -> Any:
    """A stored number as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], _WORD), ir.Constant(_WORD, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def _narrow(typing_context: Any, number: Any, like: Any) -> Any:
    """A float32 as numbers such as `like` are stored, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        bits = builder.bitcast(arguments[0], _WORD)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_WORD, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_WORD, 16)), ir.IntType(16))

    return like(types.float32, like), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e^x for x <= 0."""
    power = max(x * _LOG2_E, _SMALLEST_EXPONENT)
    whole = np.int32(power - _HALF)
    rest = power - np.float32(whole)
    series = _C6
    series = series * rest + _C5
    series = series * rest + _C4
    series = series * rest + _C3
    series = series * rest + _C2
    series = series * rest + _C1
    series = series * rest + _ONE
    return series * _float_of(np.uint32((whole + np.int32(127)) << np.int32(23)))


# Without the checks of Python's semantics: the caller has made the shapes, so no exception can arise.
_OPTIONS = {"nogil": True, "error_model": "numpy", "cache": True}
# Sums in the order that is written here, whatever calls it: that is what makes results the same everywhere.
_EXACT = {"fastmath": {"contract", "nsz"}, **_OPTIONS}
# A row's maximum and sum may be taken by lanes, which depends on nothing but the row's range.
_BY_LANES = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, **_OPTIONS}


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _write(key: Any, value: Any, keys: Any, values: Any, table: Any, owners: Any, ends: Any) -> None:
    """All before any is read: a token looks at those before it, which may be of the same step."""
    tokens, heads, size = key.shape
    for i in range(tokens):
        position = ends[i] - 1
        block, offset = table[owners[i], position // BLOCK_TOKENS], position % BLOCK_TOKENS
        for h in range(heads):
            for d in range(size):
                keys[block, h, d, offset] = key[i, h, d]
                values[block, h, offset, d] = value[i, h, d]


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _score(query: Any, key: Any, scores: Any) -> None:
    """Scores [BLOCK_TOKENS] of one query [head size] with a block's keys [head size, BLOCK_TOKENS]."""
    for t in range(BLOCK_TOKENS):
        scores[t] = _ZERO
    for d in range(0, len(query), _UNROLL):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        q4, q5, q6, q7 = query[d + 4], query[d + 5], query[d + 6], query[d + 7]
        for t in range(BLOCK_TOKENS):
            scores[t] += (
                (q0 * _widen(key[d, t]) + q1 * _widen(key[d + 1, t]))
                + (q2 * _widen(key[d + 2, t]) + q3 * _widen(key[d + 3, t]))
            ) + (
                (q4 * _widen(key[d + 4, t]) + q5 * _widen(key[d + 5, t]))
                + (q6 * _widen(key[d + 6, t]) + q7 * _widen(key[d + 7, t]))
            )


@njit(**_EXACT)  # type: ignore[untyped-decorator]
def _add(weights: Any, value: Any, sums: Any) -> None:
    """Adds a block's values [BLOCK_TOKENS, head size], each times its weight."""
    for t in range(0, BLOCK_TOKENS, _UNROLL):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        w4, w5, w6, w7 = weights[t + 4], weights[t + 5], weights[t + 6], weights[t + 7]
        for d in range(len(sums)):
            sums[d] += (
                (w0 * _widen(value[t, d]) + w1 * _widen(value[t + 1, d]))
                + (w2 * _widen(value[t + 2, d]) + w3 * _widen(value[t + 3, d]))
            ) + (
                (w4 * _widen(value[t + 4, d]) + w5 * _widen(value[t + 5, d]))
                + (w6 * _widen(value[t + 6, d]) + w7 * _widen(value[t + 7, d]))
            )


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
        weight = _exp(scores[t] - highest)
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
    query: Any, keys: Any, values: Any, blocks: Any, firsts: Any, ends: Any, bias: Any, scale: Any, out: Any
) -> None:
    """Neighbouring tokens [tokens, query heads, head size] of one sequence, whose blocks these are."""
    tokens, query_heads, size = query.shape
    heads = keys.shape[1]
    group = query_heads // heads
    alone = tokens * group == 1
    # Ranges begin and end later from token to token.
    first_block, end_block = firsts[0] // BLOCK_TOKENS, (ends[tokens - 1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    wide = np.empty((tokens, query_heads, size), np.float32)
    scores = np.empty((tokens, query_heads, end_block * BLOCK_TOKENS), np.float32)
    sums = np.zeros((tokens, query_heads, size), np.float32)
    # What several queries read, or what has to be filled up with zeros, is copied first.
    key = np.empty((size, BLOCK_TOKENS), np.float32)
    value = np.empty((BLOCK_TOKENS, size), np.float32)

    for i in range(tokens):
        for a in range(query_heads):
            for d in range(size):
                wide[i, a, d] = _widen(query[i, a, d]) * scale
    for b in range(first_block, end_block):
        start = b * BLOCK_TOKENS
        for h in range(heads):
            stored = keys[blocks[b], h]
            if alone:
                _score(wide[0, h], stored, scores[0, h, start : start + BLOCK_TOKENS])
                continue
            for d in range(size):
                for t in range(BLOCK_TOKENS):
                    key[d, t] = _widen(stored[d, t])
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
            if alone and used == BLOCK_TOKENS:
                _add(scores[0, h, start : start + BLOCK_TOKENS], stored, sums[0, h])
                continue
            for t in range(used):
                for d in range(size):
                    value[t, d] = _widen(stored[t, d])
            for t in range(used, BLOCK_TOKENS):
                for d in range(size):
                    value[t, d] = _ZERO
            for i in range(tokens):
                if start < ends[i] and start + BLOCK_TOKENS > firsts[i]:
                    for a in range(h * group, (h + 1) * group):
                        _add(scores[i, a, start : start + BLOCK_TOKENS], value, sums[i, a])
    for i in range(tokens):
        for a in range(query_heads):
            for d in range(size):
                out[i, a, d] = _narrow(sums[i, a, d], query[i, a, d])


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _tiles(owners: Any) -> Any:
    """Where each run of at most _TILE_TOKENS neighbours with one owner begins, and the end of the last."""
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
    query: Any,
    key: Any,
    value: Any,
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
    _write(key, value, keys, values, table, owners, ends)
    tiles = _tiles(owners)
    for n in range(len(tiles) - 1):
        i, j = tiles[n], tiles[n + 1]
        _attend_tile(query[i:j], keys, values, table[owners[i]], firsts[i:j], ends[i:j], bias, scale, out[i:j])


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_in_parallel(
    query: Any,
    key: Any,
    value: Any,
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
    _write(key, value, keys, values, table, owners, ends)
    tiles = _tiles(owners)
    for n in prange(len(tiles) - 1):
        i, j = tiles[n], tiles[n + 1]
        _attend_tile(query[i:j], keys, values, table[owners[i]], firsts[i:j], ends[i:j], bias, scale, out[i:j])


def attend(threads: int, *arguments: Any) -> None:
    """Computes all tokens with so many threads; see the module for the arguments, of which the last is the output."""
    if threads == 1:
        _attend_in_turn(*arguments)
    else:
        # Numba's own threads serve one caller at a time.
        with _THREADS:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _attend_in_parallel(*arguments)
