# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index"
"""Triton kernels for the parts of a layer that torch has no single operation for, and products with fixed tiles.

A row's numbers do not depend on the other rows. They are float32 inside, and of the model's dtype in memory.
"""

from functools import partial

import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from headrace_predictor.engine.gpu import INT8_BLOCK, HeadNorm, Matrix, Operations
from headrace_predictor.engine.gpu.paged_attention import LANES, attend
from headrace_predictor.engine.state.attention import Range

# Tiles of `linear`: rows, outputs, inputs, and how many are loaded ahead. Bits depend on those of floats alone.
_FLOAT_TILE, _FEW_ROWS_TILE, _INT8_TILE = (64, 32, 64, 3), (16, 32, INT8_BLOCK, 4), (64, 64, INT8_BLOCK, 2)


@triton.jit(do_not_specialize=["table_row"])
def _turn_and_store(
    packed, queries, cosines, sines, norms, keys, values, table, owners, ends,
    epsilon, block_size, table_row,
    query_heads: tl.constexpr, key_heads: tl.constexpr, size: tl.constexpr, page: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(ends + token) - 1
    block = tl.load(table + tl.load(owners + token) * table_row + position // page).to(tl.int64) * block_size
    offset = position % page
    d = tl.arange(0, width)
    is_number = d < size
    source = packed + (token * (query_heads + 2 * key_heads) + head) * size
    vector = tl.load(source + d, mask=is_number, other=0.0)
    if head >= query_heads + key_heads:
        place = ((head - query_heads - key_heads) * page + offset) * size
        tl.store(values + block + place + d, vector, mask=is_number)
    else:
        half: tl.constexpr = size // 2
        other = tl.where(d < half, d + half, d - half)  # The number that a number is turned with.
        first = vector.to(tl.float32)
        second = tl.load(source + other, mask=is_number, other=0.0).to(tl.float32)
        if norms is not None:
            norm = norms + tl.where(head < query_heads, 0, size)
            inverse = tl.rsqrt(tl.sum(first * first, 0) / size + epsilon)
            first *= inverse * tl.load(norm + d, mask=is_number, other=0.0).to(tl.float32)
            second *= inverse * tl.load(norm + other, mask=is_number, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + token * size + d, mask=is_number, other=0.0).to(tl.float32)
        sine = tl.load(sines + token * size + d, mask=is_number, other=0.0).to(tl.float32)
        turned = (first * cosine + tl.where(d < half, -second, second) * sine).to(vector.dtype)
        if head < query_heads:
            tl.store(queries + (token * query_heads + head) * size + d, turned, mask=is_number)
        else:
            place = ((head - query_heads) * size + d) * page + offset
            tl.store(keys + block + place, turned, mask=is_number)


def turn_and_store(
    packed: Tensor, rotary: tuple[Tensor, Tensor], norm: HeadNorm | None, keys: Tensor, values: Tensor, tokens: Range
) -> Tensor:
    """Norms and turns queries and keys of `packed` [T, queries, keys and values]; stores keys and values.

    Returns the queries [T, query heads, head size]. `rotary`: cosines and sines [T, head size].
    """
    heads, size, page = keys.shape[1:]
    all_heads = packed.shape[1] // size
    queries = packed.new_empty(len(packed), all_heads - 2 * heads, size)
    weights, epsilon = norm or (None, 0.0)
    _turn_and_store[len(packed), all_heads](
        packed, queries, rotary[0].contiguous(), rotary[1].contiguous(), weights,
        keys, values, tokens.table, tokens.owners, tokens.ends, epsilon, keys.stride(0), tokens.table.stride(0),
        query_heads=all_heads - 2 * heads, key_heads=heads, size=size, page=page, width=triton.next_power_of_2(size),
    )  # fmt: skip
    return queries


@triton.jit
def _gate(gate_up, out, size, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * width + tl.arange(0, width)
    gate = tl.load(gate_up + row * 2 * size + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + d, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=d < size)


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row [T, 2 n], times its second half."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _gate[rows, triton.cdiv(size, 1024)](gate_up, out, size, width=1024)
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, scales, out, rows, outputs, inputs,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    at = tl.arange(0, tile_inputs)
    lefts, rights = x + row[:, None] * inputs + at[None], weight + output[None].to(tl.int64) * inputs + at[:, None]
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for start in range(0, inputs, tile_inputs):
        is_input = start + at < inputs
        left = tl.load(lefts + start, mask=(row[:, None] < rows) & is_input[None], other=0.0)
        right = tl.load(rights + start, mask=(output[None] < outputs) & is_input[:, None], other=0)
        if scales is None:
            sums = tl.dot(left, right, sums, input_precision="ieee")
        else:  # As convert_row of cpu/formats.py, and as its products.
            left = left.to(tl.float32)
            largest = tl.max(tl.abs(left), 1)
            largest = tl.where(largest < 2.0**-120, 0.0, largest) + tl.sum(left * 0, 1)  # NaN of what is no number.
            inverse = tl.where(largest > 0, tl.div_rn(largest * 0 + 127, tl.where(largest > 0, largest, 1.0)), 0.0)
            left = (left * inverse[:, None] + 12582912.0) - 12582912.0  # 1.5 * 2^23: the nearest integer.
            exact = tl.dot(left.to(tl.int8), right)
            sums += exact.to(tl.float32) * tl.div_rn(largest, largest * 0 + 127)[:, None]
    if scales is not None:
        sums *= tl.load(scales + output, mask=output < outputs, other=0.0)[None]
    if bias is not None:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None]
    places, is_number = out + row[:, None] * outputs + output[None], (row[:, None] < rows) & (output[None] < outputs)
    if adds:
        sums += tl.load(places, mask=is_number, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_number)


def linear(x: Tensor, matrix: Matrix, total: Tensor | None = None, is_exact: bool = True) -> Tensor:
    """x [T, inputs] to x·weightᵀ + bias [T, outputs], added to `total` in place: a row's bits depend on no other row.

    With int8 weights the inputs become int8 too, INT8_BLOCK with one scale, as on the CPU, and the same sums. Floats
    that need not be exact are the library's.
    """
    if matrix.scales is None and not is_exact:
        if total is None:
            return F.linear(x, matrix.weight, matrix.bias)
        total.addmm_(x, matrix.weight.T)
        return total if matrix.bias is None else total.add_(matrix.bias)
    x, out = x.contiguous(), x.new_empty(len(x), len(matrix.weight)) if total is None else total
    tile = _FLOAT_TILE if matrix.scales is None else _FEW_ROWS_TILE if len(x) <= _FEW_ROWS_TILE[0] else _INT8_TILE
    _linear[triton.cdiv(out.shape[1], tile[1]), triton.cdiv(len(x), tile[0])](
        x, matrix.weight, matrix.bias, matrix.scales, out, len(x), *matrix.weight.shape,
        tile_rows=tile[0], tile_outputs=tile[1], tile_inputs=tile[2], num_stages=tile[3], adds=total is not None,
        enable_fp_fusion=False,  # A CPU rounds each product and each sum.
    )  # fmt: skip
    return out


def operations(is_exact: bool) -> Operations:
    """The operations by these kernels; with `is_exact`, bits of a row that do not depend on the other rows."""
    products = partial(linear, is_exact=is_exact)
    return Operations(partial(attend, lanes=1 if is_exact else LANES), products, turn_and_store, gate)
