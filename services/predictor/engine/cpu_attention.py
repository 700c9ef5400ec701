"""Attention of one query a row over paged keys and values, compiled for the CPU by Numba.

torch has no such operation: it needs the blocks copied together first, and the copy and a batch of
tiny matrix products cost several times what reading the cache once does (an OPT-125M step of 32 rows
spent two thirds of its time there).

Shapes: query and output [rows, query heads, head size]; key and value, which are written to the cache
first, [rows, heads, head size]; the cache's keys [blocks, heads, head size, BLOCK_TOKENS] and values
[blocks, heads, BLOCK_TOKENS, head size]; table int32 [rows, blocks of the longest row]; lengths int32
[rows], counting the new token. Either all float32, or all bfloat16 given as their bits, uint16; sums
are float32. Each row is computed by itself, so its result does not depend on the batch.

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

BLOCK_TOKENS = 16  # One 512-bit register of float32 holds a block's scores.
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
_OPTIONS = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "nogil": True,
    "error_model": "numpy",
    "cache": True,
}


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_row(
    i: Any,
    query: Any,
    key: Any,
    value: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    scale: Any,
    window: Any,
    out: Any,
) -> None:
    """Row i; see the module. `window` > 0 is how many of the last tokens it looks at."""
    query_heads, size = query.shape[1:]
    heads = keys.shape[1]
    group = query_heads // heads
    length = lengths[i]
    blocks = (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first = max(0, length - window) if window > 0 else 0
    first_block = first // BLOCK_TOKENS

    last, offset = table[i, blocks - 1], (length - 1) % BLOCK_TOKENS
    for h in range(heads):
        for d in range(size):
            keys[last, h, d, offset] = key[i, h, d]
            values[last, h, offset, d] = value[i, h, d]

    scaled = np.empty((query_heads, size), np.float32)
    for h in range(query_heads):
        for d in range(size):
            scaled[h, d] = _widen(query[i, h, d]) * scale

    scores = np.empty((query_heads, blocks * BLOCK_TOKENS), np.float32)
    for b in range(first_block, blocks):
        for h in range(heads):
            k = keys[table[i, b], h]
            for a in range(h * group, (h + 1) * group):
                q = scaled[a]
                s = scores[a, b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]
                for t in range(BLOCK_TOKENS):
                    s[t] = _ZERO
                for d in range(0, size, _UNROLL):
                    for t in range(BLOCK_TOKENS):
                        s[t] += (
                            q[d] * _widen(k[d, t])
                            + q[d + 1] * _widen(k[d + 1, t])
                            + q[d + 2] * _widen(k[d + 2, t])
                            + q[d + 3] * _widen(k[d + 3, t])
                            + q[d + 4] * _widen(k[d + 4, t])
                            + q[d + 5] * _widen(k[d + 5, t])
                            + q[d + 6] * _widen(k[d + 6, t])
                            + q[d + 7] * _widen(k[d + 7, t])
                        )

    for a in range(query_heads):
        s = scores[a]
        highest = _LOWEST
        for t in range(first, length):
            highest = max(highest, s[t])
        total = _ZERO
        for t in range(first, length):
            weight = _exp(s[t] - highest)
            s[t] = weight
            total += weight
        inverse = _ONE / total
        for t in range(first, length):
            s[t] *= inverse
        for t in range(first_block * BLOCK_TOKENS, first):
            s[t] = _ZERO
        for t in range(length, blocks * BLOCK_TOKENS):
            s[t] = _ZERO

    sums = np.zeros((query_heads, size), np.float32)
    for b in range(first_block, blocks):
        for h in range(heads):
            v = values[table[i, b], h]
            for a in range(h * group, (h + 1) * group):
                o = sums[a]
                w = scores[a, b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]
                for t in range(0, BLOCK_TOKENS, _UNROLL):
                    for d in range(size):
                        o[d] += (
                            w[t] * _widen(v[t, d])
                            + w[t + 1] * _widen(v[t + 1, d])
                            + w[t + 2] * _widen(v[t + 2, d])
                            + w[t + 3] * _widen(v[t + 3, d])
                            + w[t + 4] * _widen(v[t + 4, d])
                            + w[t + 5] * _widen(v[t + 5, d])
                            + w[t + 6] * _widen(v[t + 6, d])
                            + w[t + 7] * _widen(v[t + 7, d])
                        )
    for h in range(query_heads):
        for d in range(size):
            out[i, h, d] = _narrow(sums[h, d], query[i, h, d])


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_in_turn(
    query: Any,
    key: Any,
    value: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    scale: Any,
    window: Any,
    out: Any,
) -> None:
    for i in range(len(query)):
        _attend_row(i, query, key, value, keys, values, table, lengths, scale, window, out)


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def _attend_in_parallel(
    query: Any,
    key: Any,
    value: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    scale: Any,
    window: Any,
    out: Any,
) -> None:
    for i in prange(len(query)):
        _attend_row(i, query, key, value, keys, values, table, lengths, scale, window, out)


def attend(threads: int, *arguments: Any) -> None:
    """Computes all rows with so many threads; see the module for the arguments, of which the last is the output."""
    if threads == 1:
        _attend_in_turn(*arguments)
    else:
        # Numba's own threads serve one caller at a time.
        with _THREADS:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _attend_in_parallel(*arguments)
