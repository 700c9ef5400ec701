"""Attention over paged keys and values, compiled for the CPU by Numba.

torch has no such operation: it needs a sequence's blocks in one tensor. That copy and a batch of tiny matrix products
cost several times as much as reading the cache once (two thirds of the time of an OPT-125M step of 32 rows).

Neighbouring tokens of a prompt, and query heads that share a key head, read each block once for all of them. Yet every
query has sums of its own, always in the same order, so its result is the same to the last bit, for any other contents
of the step and any division of its sequence into chunks.

Shapes, with T tokens in the step: packed [T, n] has the heads of queries, then of keys, then of values, of which keys
and values are written to the cache first; or queries only, if nothing is written. Cosines and sines [T, head size] of
the rotary position embedding of queries and keys, [0, 0] for none. The cache's keys [blocks, slots, heads, head size,
BLOCK_TOKENS] and values [blocks, slots, heads, BLOCK_TOKENS, value size] are the same memory, see cache.py; a layer has
a slot of each. The output [T, query heads, value size]. table int32 [sequences, blocks of the longest]; owners int32
[T], each token's row of the table; firsts and ends int32 [T], the range of positions that a token attends to, its own
being ends - 1 if keys are written; both ascend along the tokens of a sequence. Values at or beyond a tile's end are
never read.

Where queries and cache are bfloat16 and the processor multiplies it (AMX, AVX512_BF16), queries, after their rotation
and scaling, and weights, before the division by their sum, are rounded to bfloat16 (pairs.py); sums stay float32. Else
all is float32.

Scores: above a cap of 0, a score becomes cap * tanh(score / cap). bias float32 [query heads, n] is added by distance,
the furthest first; it is constant from distance n - 1 on; [query heads, 0] for none. sinks float32 [query heads] are
scores of positions without values, which take their share of the weights; [0] for none. With `by_position` a bias is
that of the key's position instead.

Rotation is that of transformers' `apply_rotary_pos_emb`: it pairs each number with the one half a head further on.
"""

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from headrace_predictor.engine.cpu.compiled import OPTIONS, run_in_parallel
from headrace_predictor.engine.cpu.pairs import (
    HAS_MATRICES,
    PANEL_COLUMNS,
    STEP,
    add_products,
    add_row_products,
    narrow_row,
    pair_rows,
    product_type,
    write_products,
)
from headrace_predictor.engine.cpu.vectors import (
    add_weighted_rows,
    array_at,
    cap_numbers,
    exponentiate,
    narrow,
    widen,
)
from headrace_predictor.engine.state.cache import BLOCK_TOKENS

# Queries that read the cache together: neighbours in a prompt attend to nearly the same positions.
_TILE_ROWS = 128
_FEW_ROWS = 8  # For so few, a block is not worth a copy in float32.
_SEGMENT = 8 * BLOCK_TOKENS  # Positions whose keys or values are paired at once: these stay in the cache.
_SINK = 16  # Scores behind the last block, for a sink: `exponentiate` takes multiples of this.

_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(-3e38)
_F = np.empty(0, np.float32)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _turn(source: Any, cosines: Any, sines: Any, factor: Any, target: Any) -> None:
    """Multiplies a head [head size] by a factor and, if there are cosines, rotates it."""
    if len(cosines) == 0:
        for d in range(len(target)):
            target[d] = narrow(widen(source[d]) * factor, target[d])
        return
    half = len(target) // 2
    for d in range(half):
        near, far = widen(source[d]), widen(source[d + half])
        target[d] = narrow((near * widen(cosines[d]) - far * widen(sines[d])) * factor, target[d])
        turned = (far * widen(cosines[d + half]) + near * widen(sines[d + half])) * factor
        target[d + half] = narrow(turned, target[d + half])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def write_tokens(
    packed: Any,
    cosines: Any,
    sines: Any,
    keys: Any,
    values: Any,
    key_slot: Any,
    value_slot: Any,
    table: Any,
    owners: Any,
    ends: Any,
    query_heads: Any,
) -> None:
    """Writes all keys and values before any is read: a token attends to earlier tokens, also to those of this step."""
    heads, size, value_size = keys.shape[2], keys.shape[3], values.shape[4]
    first_key = query_heads * size
    first_value = first_key + heads * size
    if packed.shape[1] == first_key:
        return
    key = np.empty(size, np.float32)
    for i in range(len(packed)):
        position = ends[i] - 1
        block, offset = table[owners[i], position // BLOCK_TOKENS], position % BLOCK_TOKENS
        row = i if len(cosines) else 0
        block_keys, block_values = keys[block, key_slot], values[block, value_slot]
        for h in range(heads):
            start = first_key + h * size
            _turn(packed[i, start : start + size], cosines[row], sines[row], _ONE, key)
            for d in range(size):
                block_keys[h, d, offset] = narrow(key[d], block_keys[h, d, offset])
            value = packed[i, first_value + h * value_size :]
            for d in range(value_size):
                block_values[h, offset, d] = narrow(widen(value[d]), block_values[h, offset, d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _widen_rows(stored: Any, rows: Any) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] = widen(stored[i, j])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _blocks_of(first: Any, end: Any) -> Any:
    """The range of positions of the blocks of [first, end)."""
    return first // BLOCK_TOKENS * BLOCK_TOKENS, (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _padded(size: Any) -> Any:
    """The next multiple of what bfloat16 products take."""
    return (size + STEP - 1) // STEP * STEP


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _reaching(firsts: Any, ends: Any, start: Any) -> Any:
    """The range of those tokens that attend to any position of the block from `start` on."""
    near, far = 0, len(ends)
    while near < far and ends[near] <= start:
        near += 1
    while near < far and firsts[far - 1] >= start + BLOCK_TOKENS:
        far -= 1
    return near, far


def _score(
    like: Any, queries: Any, keys: Any, slot: Any, blocks: Any, firsts: Any, ends: Any, h: Any, memory: Any, scores: Any
) -> None:
    """Writes the products of queries [rows, head size] and a head's keys to scores [rows, positions]."""
    scores[:, firsts[0] // BLOCK_TOKENS * BLOCK_TOKENS :] = _ZERO
    key = memory[: keys.shape[3] * BLOCK_TOKENS].reshape((keys.shape[3], BLOCK_TOKENS))
    group = len(queries) // len(ends)
    for start in range(firsts[0] // BLOCK_TOKENS * BLOCK_TOKENS, ends[-1], BLOCK_TOKENS):
        near, far = _reaching(firsts, ends, start)
        rows, positions = slice(near * group, far * group), slice(start, start + BLOCK_TOKENS)
        stored = keys[blocks[start // BLOCK_TOKENS], slot, h]
        own = queries[rows, : len(stored)]
        if len(queries) <= _FEW_ROWS:
            add_weighted_rows(own, stored, scores[rows, positions])
        else:
            _widen_rows(stored, key)
            add_weighted_rows(own, key, scores[rows, positions])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh(scores: Any, first: Any, end: Any, cap: Any, bias: Any, by_position: Any, sink: Any) -> Any:
    """Turns scores into weights over [first, end), zeros elsewhere in its blocks; returns the inverse of their sum.

    `sink` has one number or none; behind the blocks of [first, end) are `_SINK` scores that nothing reads.
    """
    start, stop = _blocks_of(first, end)
    if cap > 0:
        cap_numbers(scores[start:stop], cap)
    if len(bias):
        skipped = 0 if by_position else end - len(bias)  # Positions before that of the first bias.
        near = max(first, skipped)
        for t in range(first, near):
            scores[t] += bias[0]
        reached, own = scores[near:end], bias[near - skipped : end - skipped]
        for t in range(len(reached)):
            reached[t] += own[t]
    scores[start:first] = _LOWEST
    scores[end:stop] = _LOWEST
    if len(sink):
        scores[stop : stop + _SINK] = _LOWEST
        scores[stop] = sink[0]
        stop += _SINK
    return _ONE / exponentiate(scores[start:stop])


def _sum(
    like: Any, weights: Any, values: Any, slot: Any, blocks: Any, firsts: Any, ends: Any, h: Any, memory: Any, sums: Any
) -> None:
    """Adds a head's values, times weights [rows, positions], to sums [rows, value size]."""
    value = memory[: BLOCK_TOKENS * values.shape[4]].reshape((BLOCK_TOKENS, values.shape[4]))
    group = len(sums) // len(ends)
    for start in range(firsts[0] // BLOCK_TOKENS * BLOCK_TOKENS, ends[-1], BLOCK_TOKENS):
        near, far = _reaching(firsts, ends, start)
        used = min(BLOCK_TOKENS, ends[-1] - start)
        rows, positions = slice(near * group, far * group), slice(start, start + used)
        stored = values[blocks[start // BLOCK_TOKENS], slot, h, :used]
        own = sums[rows, : values.shape[4]]
        if len(sums) <= _FEW_ROWS:
            add_weighted_rows(weights[rows, positions], stored, own)
        else:
            _widen_rows(stored, value[:used])
            add_weighted_rows(weights[rows, positions], value[:used], own)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pair_block(stored: Any, used: Any, pairs: Any) -> None:
    """Puts the first `used` rows of stored bfloat16 [n, m] into pairs, and zeros for the rest of these."""
    for panel in range(len(pairs)):
        first = panel * PANEL_COLUMNS
        columns = min(PANEL_COLUMNS, stored.shape[1] - first)
        whole = used // 2 if columns == PANEL_COLUMNS else 0
        pair_rows(stored[:, first:], pairs[panel, :whole])
        pairs[panel, whole:] = 0
        for row in range(2 * whole, used):
            for d in range(columns):
                pairs[panel, row // 2, d] |= np.uint32(stored[row, first + d]) << np.uint32(row % 2 * 16)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _reads_once(rows: Any, size: Any) -> Any:
    """Whether the rows are so few that blocks of heads of this size are not worth a copy in pairs."""
    return not HAS_MATRICES and len(rows) <= _FEW_ROWS and size % STEP == 0


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _with_next(stored: Any, slot: Any, blocks: Any, start: Any, stop: Any, h: Any) -> Any:
    """A head's keys or values of the block from `start` on, and the address of those of the next one."""
    at, last = start // BLOCK_TOKENS, stop // BLOCK_TOKENS - 1
    return stored[blocks[at], slot, h], stored[blocks[min(at + 1, last)], slot, h].ctypes.data


@overload(_score, jit_options=OPTIONS, strict=False)  # type: ignore[untyped-decorator]
def _choose_score(like: Any, *_: Any) -> Any:
    return _score_pairs if like == types.uint16 else _score


def _score_pairs(
    like: Any, queries: Any, keys: Any, slot: Any, blocks: Any, firsts: Any, ends: Any, h: Any, memory: Any, scores: Any
) -> None:
    """`_score` in bfloat16."""
    start, stop = _blocks_of(firsts[0], ends[-1])
    if _reads_once(queries, keys.shape[3]):
        scores[:, start:stop] = _ZERO
        for first in range(start, stop, BLOCK_TOKENS):
            stored, following = _with_next(keys, slot, blocks, first, stop, h)
            add_row_products(queries, stored, scores[:, first : first + BLOCK_TOKENS], following)
        return
    halves = queries.shape[1] // 2
    for first in range(start, stop, _SEGMENT):
        end = min(first + _SEGMENT, stop)
        pairs = memory.view(np.uint32)[: halves * (end - first)].reshape((-1, halves, PANEL_COLUMNS))
        for i in range(len(pairs)):
            stored = keys[blocks[first // BLOCK_TOKENS + i], slot, h]
            _pair_block(stored, len(stored), pairs[i : i + 1])
        write_products(queries, pairs, scores[:, first:end])


@overload(_sum, jit_options=OPTIONS, strict=False)  # type: ignore[untyped-decorator]
def _choose_sum(like: Any, *_: Any) -> Any:
    return _sum_pairs if like == types.uint16 else _sum


def _sum_pairs(
    like: Any, weights: Any, values: Any, slot: Any, blocks: Any, firsts: Any, ends: Any, h: Any, memory: Any, sums: Any
) -> None:
    """`_sum` in bfloat16, to which it rounds the weights, in their own memory."""
    start, stop = _blocks_of(firsts[0], ends[-1])
    rounded = weights.view(np.uint16)
    group = len(weights) // len(ends)
    for row in range(len(weights)):
        near, far = _blocks_of(firsts[row // group], ends[row // group])
        narrow_row(weights[row, near:far], rounded[row, near:far])
        rounded[row, start:near] = 0
        rounded[row, far:stop] = 0
    if _reads_once(weights, values.shape[4]):
        for first in range(start, stop, BLOCK_TOKENS):
            stored, following = _with_next(values, slot, blocks, first, stop, h)
            used = ends[-1] - first
            if used < BLOCK_TOKENS:
                whole = memory.view(np.uint16)[: stored.size].reshape(stored.shape)
                for row in range(used):
                    for d in range(stored.shape[1]):
                        whole[row, d] = stored[row, d]
                whole[used:] = 0
                stored = whole
            add_row_products(rounded[:, first : first + BLOCK_TOKENS], stored, sums, following)
        return
    panels = sums.shape[1] // PANEL_COLUMNS
    for first in range(start, stop, _SEGMENT):
        end = min(first + _SEGMENT, stop)
        count = (end - first) // 2
        pairs = memory.view(np.uint32)[: panels * count * PANEL_COLUMNS].reshape((panels, count, PANEL_COLUMNS))
        for at in range(first, end, BLOCK_TOKENS):
            stored = values[blocks[at // BLOCK_TOKENS], slot, h]
            begin = (at - first) // 2
            _pair_block(stored, min(BLOCK_TOKENS, ends[-1] - at), pairs[:, begin : begin + BLOCK_TOKENS // 2])
        add_products(rounded[:, first:end], pairs, sums)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend_tile(
    packed: Any,
    cosines: Any,
    sines: Any,
    keys: Any,
    values: Any,
    key_slot: Any,
    value_slot: Any,
    blocks: Any,
    firsts: Any,
    ends: Any,
    scale: Any,
    cap: Any,
    bias: Any,
    by_position: Any,
    sinks: Any,
    out: Any,
    heads: Any,
    like: Any,
) -> None:
    """Attends for neighbouring tokens of one sequence, whose blocks are `blocks`, with a range of key heads.

    `like`: zero of the type, float32 or bfloat16, in which queries and weights are multiplied.
    """
    tokens, query_heads, value_size = out.shape
    size = keys.shape[3]
    group = query_heads // keys.shape[2]
    rows = tokens * group  # For each token one row for each of the query heads that share a key head.
    # Both ends of the range ascend along the tokens.
    _, stop = _blocks_of(firsts[0], ends[-1])
    width, padded, value_padded = stop + _SINK, _padded(size), _padded(value_size)
    paired = max(padded, value_padded) * _SEGMENT // 2
    memory = np.empty(paired + rows * (width + 1 + padded + value_padded), np.float32)
    # Numba counts references to each row of an array that owns its memory, which took a seventh of the time. `memory`
    # is used by each head, so it lives as long as the arrays in it.
    first_score = memory.ctypes.data + paired * 4
    first_query = first_score + rows * width * 4
    first_sum = first_query + rows * padded * 4
    scores = array_at(first_score, (rows, width), _F)
    queries = array_at(first_query, (rows, padded), np.full(1, like))
    sums = array_at(first_sum, (rows, value_padded), _F)
    inverses = array_at(first_sum + rows * value_padded * 4, (rows,), _F)
    queries[:] = like
    for h in range(heads[0], heads[1]):
        for i in range(tokens):
            turning = i if len(cosines) else 0
            for g in range(group):
                first = (h * group + g) * size
                query = packed[i, first : first + size]
                _turn(query, cosines[turning], sines[turning], scale, queries[i * group + g, :size])
        _score(like, queries, keys, key_slot, blocks, firsts, ends, h, memory, scores)
        for i in range(tokens):
            for g in range(group):
                row, a = i * group + g, h * group + g
                inverses[row] = _weigh(scores[row], firsts[i], ends[i], cap, bias[a], by_position, sinks[a : a + 1])
        sums[:] = _ZERO
        _sum(like, scores, values, value_slot, blocks, firsts, ends, h, memory, sums)
        for i in range(tokens):
            for g in range(group):
                row, a = i * group + g, h * group + g
                for d in range(value_size):
                    out[i, a, d] = narrow(sums[row, d] * inverses[row], out[i, a, d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def parts(owners: Any, query_heads: Any, heads: Any, divided: Any = False) -> Any:
    """The parts [n, 4] of the work: first and end of neighbouring tokens with one owner, first and end of key heads.

    A token without neighbours is one part, or `divided` into one for each key head, as a tile of several tokens is.
    Tiles with the same head follow each other, because they read the same keys and values.
    """
    tile = max(1, _TILE_ROWS * heads // query_heads)
    found = np.empty((len(owners) * heads, 4), np.int64)
    count = 0
    for h in range(heads):
        first = 0
        for i in range(1, len(owners) + 1):
            if i < len(owners) and owners[i] == owners[first] and i - first < tile:
                continue
            alone = i - first == 1 and not divided
            if h == 0 or not alone:
                part = found[count]  # Of a tuple Numba would compile the message about a wrong size too, for seconds.
                part[0], part[1], part[2], part[3] = first, i, h, heads if alone else h + 1
                count += 1
            first = i
    return found[:count]


def _attending(loop: Any) -> Any:
    """The kernel with a loop over its work that is `range` or, for several threads, `prange`."""

    @njit(parallel=loop is prange, **OPTIONS)  # type: ignore[untyped-decorator]
    def attend(
        address: Any,
        width: Any,
        keys: Any,
        values: Any,
        key_slot: Any,
        value_slot: Any,
        table: Any,
        owners: Any,
        firsts: Any,
        ends: Any,
        scale: Any,
        cap: Any,
        bias: Any,
        by_position: Any,
        sinks: Any,
        out: Any,
    ) -> None:
        packed = array_at(address, (len(out), width), out)
        unturned = packed[:0, :0]
        write_tokens(packed, unturned, unturned, keys, values, key_slot, value_slot, table, owners, ends, out.shape[1])
        work = parts(owners, out.shape[1], keys.shape[2])
        for n in loop(len(work)):
            i, j = work[n, 0], work[n, 1]
            attend_tile(
                *(packed[i:j], unturned, unturned, keys, values, key_slot, value_slot, table[owners[i]]),
                *(firsts[i:j], ends[i:j], scale, cap, bias, by_position, sinks, out[i:j], work[n, 2:]),
                product_type(packed, keys),
            )

    return attend


_attend_in_turn, _attend_in_parallel = _attending(range), _attending(prange)


def attend(threads: int, *arguments: Any) -> None:
    """Computes all tokens with `threads` threads.

    The arguments: the address of contiguous `packed`, its width, and those of the module, the output last.
    """
    if threads == 1:
        _attend_in_turn(*arguments)
    else:
        run_in_parallel(_attend_in_parallel, threads, *arguments)
