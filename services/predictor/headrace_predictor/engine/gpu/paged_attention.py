# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index"
"""Attention over a paged cache as one Triton kernel, for tokens that decode and chunks of prompts.

Nothing of a token's output depends on the step's other tokens: its keys are divided by the length of its own range, and
all sums run in a fixed order, in float32.

Not `torch.nn.attention.varlen_attn`: it has no sinks, caps of scores, or values of another size, and the torch of many
machines has none that reads pages. With TRITON_INTERPRET=1 Triton's kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from headrace_predictor.engine.state.attention import Range, Scores

LANES = 16  # Parts of the keys of a token that decodes, computed at the same time.
_LEAST_ROWS = 16  # Of a product of tensor cores.
_PROMPT_BYTES = 64 << 8  # Of the queries of a tile of a prompt: 64 rows of 128 numbers of 16 bits.
_AHEAD_BYTES = 256  # Of a key, of which several blocks are loaded ahead.
_LEAST_PART = tl.constexpr(256)  # Keys.
_KEYS = tl.constexpr(32)  # At once.


@triton.jit(do_not_specialize=["table_row", "first_tile"])  # Each kind of what differs would be compiled.
def _attend(
    queries, keys, values, table, owners, tiles, firsts, ends, sinks, bias, out, totals,
    scale, cap, block_size, table_row, bias_row, first_tile,
    group: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, page: tl.constexpr,
    width: tl.constexpr, value_width: tl.constexpr, tile_rows: tl.constexpr, lanes: tl.constexpr,
    by_position: tl.constexpr,
):  # fmt: skip
    tile, head, lane = tiles + first_tile + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(tile)
    count = tl.load(tile + 1) - begin
    owner = tl.load(owners + begin)
    row = tl.arange(0, tile_rows)
    is_row = row < count * group
    token = begin + row // group
    query_head = head * group + row % group
    place = token.to(tl.int64) * group * tl.num_programs(1) + query_head
    d, e, n = tl.arange(0, width), tl.arange(0, value_width), tl.arange(0, _KEYS)
    query = tl.load(queries + place[:, None] * size + d[None], mask=is_row[:, None] & (d[None] < size), other=0.0)
    first = tl.load(firsts + token, mask=is_row, other=0)
    end = tl.load(ends + token, mask=is_row, other=0)
    low = tl.load(firsts + begin) // _KEYS * _KEYS  # Both ends of the range ascend along the tokens.
    high = tl.load(ends + begin + count - 1)
    part = tl.maximum(tl.cdiv(tl.cdiv(high - low, lanes), _KEYS) * _KEYS, _LEAST_PART)
    low += lane * part
    high = tl.minimum(high, low + part)
    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    if sinks is not None:  # A key without a value, which the first lane has.
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
        highest = tl.where(lane == 0, sink, highest)
        total = tl.where(lane == 0, total + 1.0, total)
    sums = tl.zeros((tile_rows, value_width), tl.float32)
    for start in range(low, high, _KEYS):
        position = start + n
        is_key = position < high
        block = tl.load(table + owner * table_row + position // page, mask=is_key, other=0).to(tl.int64) * block_size
        offset = position % page
        key = tl.load(
            keys + block[None] + (head * size + d[:, None]) * page + offset[None],
            mask=is_key[None] & (d[:, None] < size),
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        if cap > 0:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
        if bias is not None:
            own = position[None] if by_position else position[None] - end[:, None] + bias_row
            own = query_head[:, None] * bias_row + tl.minimum(tl.maximum(own, 0), bias_row - 1)
            score += tl.load(bias + own, mask=is_row[:, None] & is_key[None], other=0.0)
        is_reached = (position[None] >= first[:, None]) & (position[None] < end[:, None]) & is_key[None]
        score = tl.where(is_reached, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(highest - base)
        value = tl.load(
            values + block[:, None] + (head * page + offset[:, None]) * value_size + e[None],
            mask=is_key[:, None] & (e[None] < value_size),
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher
    place = place * lanes + lane
    if lanes > 1:
        tl.store(totals + 2 * place, highest, mask=is_row)
        tl.store(totals + 2 * place + 1, total, mask=is_row)
    if low < high:
        output = sums / tl.where(total > 0, total, 1.0)[:, None]
        is_number = is_row[:, None] & (e[None] < value_size)
        tl.store(out + place[:, None] * value_size + e[None], output.to(out.dtype.element_ty), mask=is_number)


@triton.jit
def _join(parts, totals, out, value_size: tl.constexpr, value_width: tl.constexpr, lanes: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    lane, e = place * lanes + tl.arange(0, lanes), tl.arange(0, value_width)
    highest, total = tl.load(totals + 2 * lane), tl.load(totals + 2 * lane + 1)
    factor = total * tl.exp(highest - tl.max(highest, 0))
    is_number = (total > 0)[:, None] & (e[None] < value_size)
    part = tl.load(parts + lane[:, None] * value_size + e[None], mask=is_number, other=0.0)
    joined = tl.sum(part * factor[:, None], 0) / tl.sum(factor, 0)
    tl.store(out + place * value_size + e, joined.to(out.dtype.element_ty), mask=e < value_size)


def attend(queries: Tensor, keys: Tensor, values: Tensor, tokens: Range, scores: Scores, lanes: int = LANES) -> Tensor:
    """Output [T, query heads, value size] of queries [T, query heads, head size], whose keys and values are stored.

    With one lane a token has the same bits where it decodes and in a prompt's chunk.
    """
    queries = queries.contiguous()
    count, query_heads, size = queries.shape
    heads, page, value_size = values.shape[1:]
    group, width, value_width = query_heads // heads, *(max(16, next_power_of_2(n)) for n in (size, value_size))
    bias_row = 0 if scores.bias is None else scores.bias.stride(0)
    out = queries.new_empty(count, query_heads, value_size)

    least = max(_LEAST_ROWS, next_power_of_2(group))
    most = least if lanes == 1 else max(least, _PROMPT_BYTES // (width * queries.itemsize))
    tiles = tokens.tiles(max(1, most // group))
    divided = 0 if lanes == 1 else tokens.decodes  # Tiles whose keys are.

    def launch(first: int, end: int, rows: int, lanes: int, out: Tensor, totals: Tensor | None = None) -> None:
        _attend[end - first, heads, lanes](
            queries, keys, values, tokens.table, tokens.owners, tiles, tokens.firsts, tokens.ends, scores.sinks,
            scores.bias, out, totals, scores.scale, scores.cap, keys.stride(0), tokens.table.stride(0), bias_row, first,
            group=group, size=size, value_size=value_size, page=page,
            width=width, value_width=value_width, tile_rows=rows, lanes=lanes, by_position=scores.by_position,
            # What is loaded ahead is in shared memory, of which some GPUs have 99 KiB.
            num_stages=3 if width * queries.itemsize <= _AHEAD_BYTES else 1,
        )  # fmt: skip

    if divided:
        parts, totals = (
            torch.empty(divided, query_heads, lanes, n, dtype=torch.float32, device=out.device) for n in (value_size, 2)
        )
        launch(0, divided, least, lanes, parts, totals)
        _join[(divided * query_heads,)](parts, totals, out, value_size, value_width, lanes)
    if divided < len(tiles) - 1:
        launch(divided, len(tiles) - 1, most, 1, out)
    return out
