# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index"
"""Attention over a paged cache as one Triton kernel, for tokens that decode and chunks of prompts.

Nothing of a token's output depends on the step's other tokens: its keys are divided by the length of its own range, and
all sums run in a fixed order, in float32.

Not `torch.nn.attention.varlen_attn`: it has no sinks, caps of scores, or values of another size, and the torch of many
machines has none that reads pages. With TRITON_INTERPRET=1 Triton's kernels run on a CPU.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_predictor.engine.gpu.operations import Scores, Tokens

_LEAST_ROWS = 16  # Of a product of tensor cores.
_PROMPT_BYTES = 64 << 8  # Of the queries of a tile of a prompt: 64 rows of 128 numbers of 16 bits.
_AHEAD_BYTES = 256  # Of a key, of which several blocks are loaded ahead.
_LANES = 16  # Parts of the keys of a token that decodes, computed at the same time.
_LEAST_PART = 256  # Keys.
_KEYS = 32  # At once.


@triton.jit(do_not_specialize=["table_row"])  # It differs from step to step, and each kind would be compiled.
def _attend(
    queries,
    keys,
    values,
    table,
    tiles,
    firsts,
    ends,
    sinks,
    out,
    parts,
    weights,
    scale,
    cap,
    query_row,
    query_stride,
    key_block,
    key_head,
    value_block,
    value_head,
    table_row,
    group: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    page: tl.constexpr,
    tile_rows: tl.constexpr,
    lanes: tl.constexpr,
    least_part: tl.constexpr,
    key_count: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    has_tiles: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
):
    tile, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if has_tiles:
        begin = tl.load(tiles + 3 * tile)
        count = tl.load(tiles + 3 * tile + 1)
        owner = tl.load(tiles + 3 * tile + 2)
    else:
        begin, count, owner = tile, 1, tile
    row = tl.arange(0, tile_rows)
    is_row = row < count * group
    token = begin + row // group
    query_head = head * group + row % group
    query_heads = tl.num_programs(1) * group
    d, e, n = tl.arange(0, width), tl.arange(0, value_width), tl.arange(0, key_count)
    query = tl.load(
        queries + token[:, None].to(tl.int64) * query_row + query_head[:, None] * query_stride + d[None],
        mask=is_row[:, None] & (d[None] < size),
        other=0.0,
    )
    first = tl.load(firsts + token, mask=is_row, other=0)
    end = tl.load(ends + token, mask=is_row, other=0)
    low = tl.load(firsts + begin) // key_count * key_count  # Both ends of the range ascend along the tokens.
    high = tl.load(ends + begin + count - 1)
    part = (
        tl.maximum(tl.cdiv(tl.cdiv(high - low, lanes), key_count) * key_count, least_part) if lanes > 1 else high - low
    )
    low += lane * part
    high = tl.minimum(high, low + part)
    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    sums = tl.zeros((tile_rows, value_width), tl.float32)
    for start in range(low, high, key_count):
        position = start + n
        is_key = position < high
        block = tl.load(table + owner * table_row + position // page, mask=is_key, other=0).to(tl.int64)
        offset = position % page
        key = tl.load(
            keys + block[None] * key_block + head * key_head + d[:, None] * page + offset[None],
            mask=is_key[None] & (d[:, None] < size),
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        if has_cap:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
        is_reached = (position[None] >= first[:, None]) & (position[None] < end[:, None]) & is_key[None]
        score = tl.where(is_reached, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(highest - base)
        value = tl.load(
            values + block[:, None] * value_block + head * value_head + offset[:, None] * value_size + e[None],
            mask=is_key[:, None] & (e[None] < value_size),
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher
    place = token.to(tl.int64) * query_heads + query_head
    is_number = is_row[:, None] & (e[None] < value_size)
    if lanes > 1:
        tl.store(weights + 2 * (place * lanes + lane), highest, mask=is_row)
        tl.store(weights + 2 * (place * lanes + lane) + 1, total, mask=is_row)
        if low < high:
            tl.store(parts + ((place * lanes + lane) * value_size)[:, None] + e[None], sums, mask=is_number)
    else:
        if has_sinks:
            sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
            higher = tl.maximum(highest, sink)
            total = total * tl.exp(highest - higher) + tl.exp(sink - higher)
            sums *= tl.exp(highest - higher)[:, None]
        total = tl.where(is_row, total, 1.0)
        tl.store(out + (place * value_size)[:, None] + e[None], (sums / total[:, None]).to(query.dtype), mask=is_number)


@triton.jit
def _join(
    parts,
    weights,
    sinks,
    out,
    value_size: tl.constexpr,
    lanes: tl.constexpr,
    value_width: tl.constexpr,
    has_sinks: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    place = token.to(tl.int64) * tl.num_programs(1) + head
    lane, e = tl.arange(0, lanes), tl.arange(0, value_width)
    highests = tl.load(weights + 2 * (place * lanes + lane))
    totals = tl.load(weights + 2 * (place * lanes + lane) + 1)
    highest = tl.max(highests, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    factors = tl.exp(highests - highest)
    total = tl.sum(totals * factors, 0)
    if has_sinks:
        total += tl.exp(sink - highest)
    is_part = (highests != float("-inf"))[:, None] & (e[None] < value_size)
    sums = tl.load(parts + ((place * lanes + lane) * value_size)[:, None] + e[None], mask=is_part, other=0.0)
    joined = tl.sum(sums * factors[:, None], 0) / total
    tl.store(out + place * value_size + e, joined.to(out.dtype.element_ty), mask=e < value_size)


class PagedAttention(NamedTuple):
    """The kernel. With `is_exact`, a token has the same bits where it decodes and in a prompt's chunk."""

    is_exact: bool = False

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, scores: Scores) -> Tensor:
        """See `Attend`."""
        count, query_heads, size = queries.shape
        heads, value_size, page = values.shape[1], values.shape[3], values.shape[2]
        group = query_heads // heads
        out = queries.new_empty(count, query_heads, value_size)
        sinks = out if scores.sinks is None else scores.sinks
        width = max(16, triton.next_power_of_2(size))
        least = max(_LEAST_ROWS, triton.next_power_of_2(group))
        lanes = 1 if self.is_exact else _LANES
        parts = weights = out
        if lanes > 1:
            parts = torch.empty(tokens.decodes, query_heads, lanes, value_size, dtype=torch.float32, device=out.device)
            weights = torch.empty(tokens.decodes, query_heads, lanes, 2, dtype=torch.float32, device=out.device)
        shapes: dict[str, Any] = {
            "value_size": value_size,
            "value_width": max(16, triton.next_power_of_2(value_size)),
            "has_sinks": scores.sinks is not None,
        }

        def attend(tiles: Tensor | None, number: int, rows: int, lanes: int) -> None:
            _attend[number, heads, lanes](
                *(queries, keys, values, tokens.table, out if tiles is None else tiles),
                *(tokens.firsts, tokens.ends, sinks, out, parts, weights, scores.scale, scores.cap),
                *(*queries.stride()[:2], keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
                tokens.table.stride(0),
                group=group,
                size=size,
                page=page,
                tile_rows=rows,
                lanes=lanes,
                least_part=_LEAST_PART,
                key_count=_KEYS,
                width=width,
                has_tiles=tiles is not None,
                has_cap=scores.cap > 0,
                # What is loaded ahead is in shared memory, of which some GPUs have 99 KiB.
                num_stages=3 if width * queries.itemsize <= _AHEAD_BYTES else 1,
                **shapes,
            )

        if tokens.decodes:
            attend(None, tokens.decodes, least, lanes)
            if lanes > 1:
                _join[tokens.decodes, query_heads](parts, weights, sinks, out, lanes=lanes, **shapes)
        if tokens.decodes < count:
            rows = least if self.is_exact else max(least, _PROMPT_BYTES // (width * queries.itemsize))
            tiles = tokens.tiles(max(1, rows // group))
            attend(tiles, len(tiles), rows, 1)
        return out
