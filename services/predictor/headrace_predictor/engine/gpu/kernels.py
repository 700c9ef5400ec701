# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index"
"""Triton kernels for the parts of a layer that torch has no single operation for, and a product with fixed tiles.

A row's numbers do not depend on the other rows. They are float32 inside, and of the model's dtype in memory.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from headrace_predictor.engine.gpu.operations import HeadNorms, Tokens
from headrace_predictor.engine.gpu.paged_attention import PagedAttention

_TILE_ROWS, _TILE_OUTPUTS, _TILE_INPUTS = 64, 32, 64  # Of `linear`.


@triton.jit(do_not_specialize=["table_row"])
def _turn_and_store(
    packed,
    queries,
    cosines,
    sines,
    query_norm,
    key_norm,
    keys,
    values,
    table,
    owners,
    ends,
    epsilon,
    packed_row,
    key_block,
    key_head,
    value_block,
    value_head,
    table_row,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    size: tl.constexpr,
    page: tl.constexpr,
    width: tl.constexpr,
    has_norms: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(ends + token) - 1
    block = tl.load(table + tl.load(owners + token) * table_row + position // page).to(tl.int64)
    offset = position % page
    d = tl.arange(0, width)
    is_number = d < size
    source = packed + token.to(tl.int64) * packed_row + head * size
    vector = tl.load(source + d, mask=is_number, other=0.0)
    if head >= query_heads + key_heads:
        value_place = values + block * value_block + (head - query_heads - key_heads) * value_head + offset * size
        tl.store(value_place + d, vector, mask=is_number)
    else:
        half: tl.constexpr = size // 2
        other = tl.where(d < half, d + half, d - half)  # The number that a number is turned with.
        first = vector.to(tl.float32)
        second = tl.load(source + other, mask=is_number, other=0.0).to(tl.float32)
        if has_norms:
            norm = query_norm if head < query_heads else key_norm
            inverse = tl.rsqrt(tl.sum(first * first, 0) / size + epsilon)
            first *= inverse * tl.load(norm + d, mask=is_number, other=0.0).to(tl.float32)
            second *= inverse * tl.load(norm + other, mask=is_number, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + token * size + d, mask=is_number, other=0.0).to(tl.float32)
        sine = tl.load(sines + token * size + d, mask=is_number, other=0.0).to(tl.float32)
        turned = (first * cosine + tl.where(d < half, -second, second) * sine).to(vector.dtype)
        if head < query_heads:
            tl.store(queries + (token.to(tl.int64) * query_heads + head) * size + d, turned, mask=is_number)
        else:
            key_place = keys + block * key_block + (head - query_heads) * key_head + offset
            tl.store(key_place + d * page, turned, mask=is_number)


def turn_and_store(
    packed: Tensor, rotary: tuple[Tensor, Tensor], norms: HeadNorms | None, keys: Tensor, values: Tensor, tokens: Tokens
) -> Tensor:
    """See `Operations`."""
    heads, size, page = keys.shape[1:]
    all_heads = packed.shape[1] // size
    queries = packed.new_empty(len(packed), all_heads - 2 * heads, size)
    _turn_and_store[len(packed), all_heads](
        *(packed, queries, rotary[0].contiguous(), rotary[1].contiguous()),
        *((packed, packed) if norms is None else norms[:2]),
        *(keys, values, tokens.table, tokens.owners, tokens.ends, 0.0 if norms is None else norms.epsilon),
        *(packed.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        tokens.table.stride(0),
        query_heads=all_heads - 2 * heads,
        key_heads=heads,
        size=size,
        page=page,
        width=triton.next_power_of_2(size),
        has_norms=norms is not None,
    )
    return queries


@triton.jit
def _add_norm(
    hidden, added, weight, total, normed, epsilon, size: tl.constexpr, width: tl.constexpr, adds: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    d = tl.arange(0, width)
    is_number = d < size
    vector = tl.load(hidden + row + d, mask=is_number, other=0.0)
    dtype = vector.dtype
    if adds:
        vector = (vector.to(tl.float32) + tl.load(added + row + d, mask=is_number, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + row + d, vector, mask=is_number)
    vector = vector.to(tl.float32)
    factor = tl.load(weight + d, mask=is_number, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(vector * vector, 0) / size + epsilon)
    tl.store(normed + row + d, (vector * inverse * factor).to(dtype), mask=is_number)


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `Operations`."""
    total, normed = (hidden if added is None else torch.empty_like(hidden)), torch.empty_like(hidden)
    size = hidden.shape[1]
    _add_norm[(len(hidden),)](
        *(hidden, hidden if added is None else added, weight, total, normed, epsilon),
        size=size,
        width=triton.next_power_of_2(size),
        adds=added is not None,
    )
    return total, normed


@triton.jit
def _gate(gate_up, out, size, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * width + tl.arange(0, width)
    gate = tl.load(gate_up + row * 2 * size + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + d, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=d < size)


def gate(gate_up: Tensor) -> Tensor:
    """See `Operations`."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _gate[rows, triton.cdiv(size, 1024)](gate_up, out, size, width=1024)
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    has_bias: tl.constexpr,
):
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    at = tl.arange(0, tile_inputs)
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for start in range(0, inputs, tile_inputs):
        is_input = start + at < inputs
        left = tl.load(
            x + row[:, None].to(tl.int64) * inputs + start + at[None],
            mask=(row[:, None] < rows) & is_input[None],
            other=0.0,
        )
        right = tl.load(
            weight + output[None].to(tl.int64) * inputs + start + at[:, None],
            mask=(output[None] < outputs) & is_input[:, None],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None]
    place = row[:, None].to(tl.int64) * outputs + output[None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (output[None] < outputs))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x [T, inputs] in tiles of one size: a row's bits do not depend on the others."""
    x = x.contiguous()
    out = x.new_empty(len(x), len(weight))
    _linear[triton.cdiv(len(weight), _TILE_OUTPUTS), triton.cdiv(len(x), _TILE_ROWS)](
        *(x, weight, out if bias is None else bias, out, len(x), *weight.shape),
        tile_rows=_TILE_ROWS,
        tile_outputs=_TILE_OUTPUTS,
        tile_inputs=_TILE_INPUTS,
        has_bias=bias is not None,
    )
    return out


class GpuOperations:
    """The operations by these kernels; with `is_exact`, bits of a row that do not depend on the other rows."""

    turn_and_store, add_norm, gate = staticmethod(turn_and_store), staticmethod(add_norm), staticmethod(gate)

    def __init__(self, is_exact: bool) -> None:
        self.attend = PagedAttention(is_exact)
        self.linear = linear if is_exact else F.linear

    def check(self, device: torch.device) -> None:
        """Compiles and runs a kernel; raises where Triton or its compiler cannot."""
        numbers = torch.ones(1, 2, device=device)
        if not torch.allclose(gate(numbers), F.silu(numbers[:, :1])):
            raise RuntimeError("a kernel is wrong")
