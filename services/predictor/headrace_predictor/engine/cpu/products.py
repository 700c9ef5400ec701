"""The innermost products of the streamed formats: some rows of inputs with one panel of 64 output channels.

The format is told by the type of the weights: float32; bfloat16's bits are uint16; 8 bits uint8 (a weight plus 128);
4 bits int8 (two weights plus 8 in each byte); groups of one of KINDS int32. formats.py and grouped.py have the layouts.
A sum of integer products is exact in any order. The rest of an integer format is additions and multiplications that are
rounded one by one, in an order that depends on nothing but the number of inputs: so a result is the same for any number
of rows, any threads and on any processor. So is that of float32, where a product and its sum are rounded once. A
bfloat16 sum has one order too, that of the processor's instruction.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_predictor.engine.cpu import emit
from headrace_predictor.engine.cpu.emit import FLOAT, FLOATS, INTS, LINE, SIZE, VECTORS, WORD, all_lanes
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, KINDS, PANEL, ROWS, Kind
from headrace_predictor.engine.cpu.int4 import int4
from headrace_predictor.engine.cpu.pairs import (
    HAS_BYTE_MATRICES,
    HAS_MATRICES,
    STEP,
    Rows,
    add_vectors,
    with_rows,
    with_tiles,
)
from headrace_predictor.engine.cpu.tile_products import add_panel, ahead_of, int4_by_tiles, int8_by_tiles, part_behind
from headrace_predictor.engine.cpu.vectors import splat


@intrinsic  # type: ignore[untyped-decorator]
def multiply(
    typing_context: Any,
    weights: Any,
    kind: Any,
    rows: Any,
    at: Any,
    inputs: Any,
    stride: Any,
    scales: Any,
    sums: Any,
    sums_stride: Any,
    blocks: Any,
    out: Any,
) -> Any:
    """Adds the products of rows of inputs, over `blocks` blocks, to float32 `out` [rows, PANEL]; see `rows_at_once`.

    `weights` is an empty array of the format's type; `kind`: of grouped weights an index of KINDS, and in a model of
    4-bit weights 1 if this product has 8.
    Addresses: `at` of a panel's first block, `inputs` of the first row, `scales` float32 and `sums` int32 of its first
    block; `stride` and `sums_stride` are the bytes from one row to the next, of inputs (an int8 row has a scale for
    each BLOCK of them, but none for a rest) and of sums.
    """
    eight = _bits_8, int8_by_tiles
    emitters: dict[Any, list[tuple[Callable[..., None], Callable[..., None] | None]]] = {
        types.uint8: [eight],
        types.int8: [(int4, int4_by_tiles), eight],
        types.int32: [(partial(_grouped, kind), None) for kind in KINDS],
        types.float32: [(_floats, None)],
    }
    kinds = emitters.get(weights.dtype, [])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, other, count, at, inputs, stride, scales, sums, sums_stride, blocks, out = arguments
        own = emit.Operands(
            panel=at,
            inputs=Rows(inputs, stride),
            scales=Rows(scales, builder.mul(builder.udiv(stride, SIZE(BLOCK)), SIZE(4))),
            sums=Rows(sums, sums_stride),
            blocks=blocks,
            out=Rows(out, SIZE(4 * PANEL)),
        )
        if weights.dtype == types.uint16:
            _bfloat16(builder, count, own)
        for flag, (add_block, by_tiles) in enumerate(kinds):
            wanted = builder.icmp_signed("==", other, SIZE(flag)) if len(kinds) > 1 else ir.Constant(ir.IntType(1), 1)
            for n in range(1, ROWS + 1):
                with builder.if_then(builder.and_(wanted, builder.icmp_signed("==", count, SIZE(n)))):
                    _few_rows(builder, add_block, n, own)
            if by_tiles is not None and _has_tiles(weights.dtype):
                with builder.if_then(builder.and_(wanted, builder.icmp_signed(">", count, SIZE(ROWS)))):
                    by_tiles(builder, count, own)
        return context.get_dummy_value()

    return types.void(weights, *(types.int64,) * 10), generate


@intrinsic  # type: ignore[untyped-decorator]
def rows_at_once(typing_context: Any, weights: Any) -> Any:
    """How many rows `multiply` takes at most, for an empty array of the format's type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return SIZE(1 << 30 if weights.dtype == types.uint16 or _has_tiles(weights.dtype) else ROWS)

    return types.int64(weights), generate


def _has_tiles(kind: Any) -> bool:
    """Whether the processor multiplies matrices of this type of weights."""
    return bool((HAS_MATRICES and kind == types.uint16) or (HAS_BYTE_MATRICES and kind in (types.uint8, types.int8)))


def _few_rows(builder: Any, add_block: Callable[..., None], count: int, own: emit.Operands) -> None:
    rows = [
        emit.Row(
            inputs=own.inputs.at(builder, SIZE(r)).address,
            scales=own.scales.at(builder, SIZE(r)).address,
            sums=own.sums.at(builder, SIZE(r)).address,
            totals=[cgutils.alloca_once(builder, FLOATS) for _ in range(VECTORS)],
        )
        for r in range(count)
    ]
    places = [builder.add(own.out.address, SIZE(LINE * i)) for i in range(count * VECTORS)]
    totals = [total for row in rows for total in row.totals]
    for place, total in zip(places, totals, strict=True):
        builder.store(emit.load(builder, place, 0, FLOATS, 4), total)
    with emit.loop(builder, own.blocks) as block:
        add_block(builder, own.panel, rows, block)
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(total), emit.pointer(builder, place, 0, FLOATS), align=4)


def _bfloat16(builder: Any, count: Any, own: emit.Operands) -> None:
    steps, weights = builder.mul(own.blocks, SIZE(BLOCK // STEP)), Rows(own.panel, SIZE(4 * PANEL))
    if not HAS_MATRICES:
        _by_vectors(builder, count, steps, weights, own)
        return

    def add(row: Any, tiles: int) -> None:
        ahead = ahead_of(builder, tiles, own.panel, steps, row, count)
        add_panel(builder, tiles, steps, own.inputs.at(builder, row), weights, own.out.at(builder, row), ahead)

    with_tiles(builder, count, add)


def _by_vectors(builder: Any, count: Any, steps: Any, weights: Rows, own: emit.Operands) -> None:
    """Few rows fetch what they read next; of many, all fetch a part of the weights behind."""
    is_few = builder.icmp_unsigned("<=", count, SIZE(ROWS))

    def add(row: Any, rows: int) -> None:
        operands = own.inputs.at(builder, row), weights, own.out.at(builder, row)
        with builder.if_else(is_few) as (few, many):
            with few:
                add_vectors(builder, rows, VECTORS, steps, *operands, reads_memory=True)
            with many:
                ahead = part_behind(builder, own.panel, steps, row, count, ROWS)
                add_vectors(builder, rows, VECTORS, steps, *operands, ahead=ahead)

    with_rows(builder, count, ROWS, add)


def _floats(builder: Any, panel: Any, rows: list[emit.Row], block: Any) -> None:
    fma = builder.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(FLOATS, [FLOATS] * 3))
    with emit.groups_of(builder, block) as group:
        weights = emit.behind(builder, panel, group, 4 * GROUP * PANEL)
        own = [emit.behind(builder, row.inputs, group, 4 * GROUP) for row in rows]
        for k in range(GROUP):
            vectors = [builder.bitcast(vector, FLOATS) for vector in emit.read_panel(builder, weights, k)]
            for row, inputs in zip(rows, own, strict=True):
                number = emit.broadcast(builder, inputs, 4 * k, FLOAT)
                for vector, total in zip(vectors, row.totals, strict=True):
                    builder.store(builder.call(fma, (number, vector, builder.load(total))), total)


def _bits_8(builder: Any, panel: Any, rows: list[emit.Row], block: Any) -> None:
    starts = [emit.broadcast(builder, emit.behind(builder, row.sums, block, 4)) for row in rows]
    exact = [[cgutils.alloca_once_value(builder, start) for _ in range(VECTORS)] for start in starts]
    with emit.groups_of(builder, block) as group:
        weights = emit.behind(builder, panel, group, GROUP * PANEL)
        own = [emit.behind(builder, row.inputs, group, GROUP) for row in rows]
        for k in range(GROUP // 4):
            vectors = emit.read_panel(builder, weights, k)
            for row, numbers in zip(own, exact, strict=True):
                quad = emit.broadcast(builder, row, 4 * k)
                for vector, number in zip(vectors, numbers, strict=True):
                    builder.store(emit.add_quads(builder, builder.load(number), vector, quad), number)
    for row, numbers in zip(rows, exact, strict=True):
        emit.add_scaled(builder, [builder.sitofp(builder.load(number), FLOATS) for number in numbers], row, block)


def _grouped(kind: Kind, builder: Any, panel: Any, rows: list[emit.Row], block: Any) -> None:
    low, four = all_lanes(INTS, 0x0F0F0F0F), all_lanes(INTS, 4)
    with emit.groups_of(builder, block) as group:
        weights = emit.behind(builder, panel, group, kind.group_bytes)
        own = [emit.behind(builder, row.inputs, group, GROUP) for row in rows]
        halves = [emit.behind(builder, row.sums, group, 8) for row in rows]
        pairs = [[emit.load(builder, row, 4 * half, WORD, 4) for half in (0, 1)] for row in halves]
        wholes = [builder.add(*pair) for pair in pairs]
        numbers = builder.add(weights, SIZE(4 * PANEL * (kind.scales + kind.has_minimum)))
        floats: list[list[Any]] = [[] for _ in rows]
        for part in range(kind.scales):
            starts = wholes if kind.scales == 1 else [pair[part] for pair in pairs]
            # 8 bits have 128 more than the weight.
            starts = [builder.mul(start, WORD(-128 if kind.bits == 8 else 0)) for start in starts]
            exact = [[splat(builder, start, emit.LANES)] * VECTORS for start in starts]
            quads = GROUP // 4 // kind.scales
            for k in range(part * quads, (part + 1) * quads):
                vectors = emit.read_panel(builder, numbers, k if kind.bits == 8 else k // 2)
                if kind.bits == 4:
                    vectors = [builder.and_(builder.lshr(one, four) if k % 2 else one, low) for one in vectors]
                for row, own_numbers in zip(own, exact, strict=True):
                    quad = emit.broadcast(builder, row, 4 * k)
                    for v, vector in enumerate(vectors):
                        own_numbers[v] = emit.add_quads(builder, own_numbers[v], vector, quad)
            for v in range(VECTORS):
                scale = emit.load(builder, weights, LINE * (VECTORS * part + v), FLOATS, LINE)
                for row_floats, own_numbers in zip(floats, exact, strict=True):
                    scaled = builder.fmul(builder.sitofp(own_numbers[v], FLOATS), scale)
                    if part:
                        row_floats[v] = builder.fadd(row_floats[v], scaled)
                    else:
                        row_floats.append(scaled)
        if kind.has_minimum:
            for v in range(VECTORS):
                minimum = emit.load(builder, weights, LINE * (VECTORS * kind.scales + v), FLOATS, LINE)
                for row_floats, whole in zip(floats, wholes, strict=True):
                    sum_ = splat(builder, builder.sitofp(whole, emit.FLOAT), emit.LANES)
                    row_floats[v] = builder.fsub(row_floats[v], builder.fmul(sum_, minimum))
        for row_floats, row in zip(floats, rows, strict=True):
            emit.add_scaled(builder, row_floats, row, block)
