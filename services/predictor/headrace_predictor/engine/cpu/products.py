"""The innermost products of the streamed formats: some rows of inputs with one panel of 64 output channels.

The format is told by the type of the weights: bfloat16's bits are uint16, 8 bits uint8 (a weight plus 128), 4 bits int8
(two weights plus 8 in each byte), groups of one of KINDS int32. formats.py and grouped.py have the layouts. A sum of
integer products is exact in any order. The rest of an integer format is additions and multiplications that are rounded
one by one, in an order that depends on nothing but the number of inputs: so a result is the same for any number of
rows, any threads and on any processor. A bfloat16 sum has one order too, that of the processor's instruction.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, GROUP_BYTES, KINDS, PANEL, ROWS, Kind
from headrace_predictor.engine.cpu.pairs import (
    AHEAD,
    FEATURES,
    HAS_BYTE_MATRICES,
    HAS_MATRICES,
    STEP,
    TILES_ROWS,
    Rows,
    add_tiles,
    add_vectors,
    with_tiles,
)
from headrace_predictor.engine.cpu.vectors import splat

_VECTORS, _LANES = 4, 16  # A panel in vectors of 32-bit numbers.
_LINE = 64  # Bytes of a vector.

_SIZE, _BYTE, _HALF, _WORD = (ir.IntType(bits) for bits in (64, 8, 16, 32))
_FLOAT = ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_WORD, _LANES), ir.VectorType(_FLOAT, _LANES)


_HAS_VNNI = "avx512vnni" in FEATURES


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
    emitters: dict[Any, list[Callable[..., None]]] = {
        types.uint8: [_bits_8],
        types.int8: [_bits_4, _bits_8],
        types.int32: [partial(_grouped, kind) for kind in KINDS],
    }
    kinds = emitters.get(weights.dtype, [])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, other, count, *rest = arguments
        if weights.dtype == types.uint16:
            at, inputs, stride, *_, blocks, out = rest
            _bfloat16(builder, count, blocks, Rows(inputs, stride), at, out)
            return context.get_dummy_value()
        for flag, emit in enumerate(kinds):
            wanted = builder.icmp_signed("==", other, _SIZE(flag)) if len(kinds) > 1 else ir.Constant(ir.IntType(1), 1)
            for n in range(1, ROWS + 1):
                with builder.if_then(builder.and_(wanted, builder.icmp_signed("==", count, _SIZE(n)))):
                    _tile(builder, emit, n, *rest)
        if _has_tiles(weights.dtype):
            with builder.if_then(builder.icmp_signed(">", count, _SIZE(ROWS))):
                _bits_8_by_tiles(builder, count, *rest)
        return context.get_dummy_value()

    return types.void(weights, *(types.int64,) * 10), generate


@intrinsic  # type: ignore[untyped-decorator]
def rows_at_once(typing_context: Any, weights: Any) -> Any:
    """How many rows `multiply` takes at most, for an empty array of the format's type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _SIZE(1 << 30 if _has_tiles(weights.dtype) else ROWS)

    return types.int64(weights), generate


def _has_tiles(kind: Any) -> bool:
    """Whether the processor multiplies matrices of this type of weights."""
    return bool((HAS_MATRICES and kind == types.uint16) or (HAS_BYTE_MATRICES and kind == types.uint8))


@intrinsic  # type: ignore[untyped-decorator]
def is_int4(typing_context: Any, weights: Any) -> Any:
    """Whether an empty array has the type of 4-bit weights."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(weights.dtype == types.int8))

    return types.boolean(weights), generate


def _tile(
    builder: Any,
    emit: Callable[..., None],
    rows: int,
    at: Any,
    inputs: Any,
    stride: Any,
    scales: Any,
    sums: Any,
    sums_stride: Any,
    blocks: Any,
    out: Any,
) -> None:
    places = [builder.add(out, _SIZE(_LINE * i)) for i in range(rows * _VECTORS)]
    totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
    flat = [total for row in totals for total in row]
    for place, total in zip(places, flat, strict=True):
        builder.store(_load(builder, place, 0, _FLOATS, 4), total)
    own = [builder.add(inputs, builder.mul(stride, _SIZE(r))) for r in range(rows)]
    scales_stride = _scales_stride(builder, stride)
    own_scales = [builder.add(scales, builder.mul(scales_stride, _SIZE(r))) for r in range(rows)]
    own_sums = [builder.add(sums, builder.mul(sums_stride, _SIZE(r))) for r in range(rows)]
    with cgutils.for_range_slice(builder, _SIZE(0), blocks, _SIZE(1), _SIZE) as (block, _):
        emit(builder, at, own, own_scales, own_sums, block, totals)
    for place, total in zip(places, flat, strict=True):
        builder.store(builder.load(total), _pointer(builder, place, 0, _FLOATS), align=4)


def _scales_stride(builder: Any, stride: Any) -> Any:
    return builder.mul(builder.udiv(stride, _SIZE(BLOCK)), _SIZE(4))


def _bfloat16(builder: Any, count: Any, blocks: Any, inputs: Rows, at: Any, out: Any) -> None:
    steps = builder.mul(blocks, _SIZE(BLOCK // STEP))
    weights, target = Rows(at, _SIZE(4 * PANEL)), Rows(out, _SIZE(4 * PANEL))
    if not HAS_MATRICES:
        for n in range(1, ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", count, _SIZE(n))):
                add_vectors(builder, n, _VECTORS, steps, inputs, weights, target)
        return

    def add(row: Any, tiles: int) -> None:
        ahead = _ahead(builder, at, blocks, 4 * PANEL * BLOCK // 2, row, steps)
        own, out = inputs.at(builder, row), target.at(builder, row)
        _add_panel(builder, tiles, steps, own, weights, out, ahead, builder.mul(steps, _SIZE(AHEAD)))

    with_tiles(builder, count, add)


def _ahead(builder: Any, at: Any, blocks: Any, block_bytes: int, row: Any, steps: Any) -> Any:
    """The part that these rows fetch of the weights behind those at `at`: each of their steps fetches AHEAD bytes."""
    columns = builder.mul(steps, _SIZE(AHEAD * 2))
    part = builder.mul(builder.udiv(row, _SIZE(TILES_ROWS)), columns)
    return builder.add(builder.add(at, builder.mul(blocks, _SIZE(block_bytes))), part)


def _add_panel(
    builder: Any,
    tiles: int,
    steps: Any,
    inputs: Rows,
    weights: Rows,
    sums: Rows,
    ahead: Any,
    ahead_stride: Any,
    **how: Any,
) -> None:
    """`add_tiles` for the columns of a panel; of two tiles each half fetches its part of the weights to come."""
    across = 4 // tiles  # Few rows read the weights in the order of their memory.
    for column in range(0, 4 * PANEL, 64 * across):
        right, out = (rows.at(builder, _SIZE(0), column) for rows in (weights, sums))
        own = builder.add(ahead, ahead_stride) if column else ahead
        add_tiles(builder, tiles, across, steps, inputs, right, out, ahead=own if tiles > 1 else None, **how)


def _bits_8_by_tiles(
    builder: Any, count: Any, at: Any, inputs: Any, stride: Any, scales: Any, sums: Any, sums_stride: Any, *rest: Any
) -> None:
    """The sums of `_bits_8`, bit by bit, for any number of rows."""
    blocks, out = rest
    memory = cgutils.alloca_once(builder, ir.ArrayType(_INTS, _VECTORS * TILES_ROWS))
    exact = Rows(builder.ptrtoint(memory, _SIZE), _SIZE(4 * PANEL))
    own_scales, own_sums = Rows(scales, _scales_stride(builder, stride)), Rows(sums, sums_stride)

    def add(first: Any, tiles: int) -> None:
        steps = _SIZE(BLOCK // (2 * STEP))
        all_steps = builder.mul(blocks, steps)
        ahead = _ahead(builder, at, blocks, PANEL * BLOCK, first, all_steps)
        left_rows = builder.sub(count, first)
        most = _SIZE(TILES_ROWS)
        many = builder.select(builder.icmp_unsigned("<", left_rows, most), left_rows, most)
        own_out = Rows(out, exact.stride).at(builder, first)
        with cgutils.for_range_slice(builder, _SIZE(0), blocks, _SIZE(1), _SIZE) as (block, _):
            left = Rows(inputs, stride).at(builder, first, builder.mul(block, _SIZE(BLOCK)))
            right = Rows(at, _SIZE(4 * PANEL)).at(builder, builder.mul(block, _SIZE(BLOCK // 4)))
            fetched = builder.add(ahead, builder.mul(block, _SIZE(AHEAD * BLOCK // (2 * STEP))))
            _add_panel(
                builder,
                tiles,
                steps,
                left,
                right,
                exact,
                fetched,
                builder.mul(all_steps, _SIZE(AHEAD)),
                is_new=True,
                instruction="tdpbsud",
            )
            with cgutils.for_range_slice(builder, _SIZE(0), many, _SIZE(1), _SIZE) as (row, _):
                place = builder.mul(block, _SIZE(4))
                token = builder.add(first, row)
                start = _load(builder, own_sums.at(builder, token, place).address, 0, _WORD, 4)
                scale = _load(builder, own_scales.at(builder, token, place).address, 0, _FLOAT, 4)
                start, scale = splat(builder, start, _LANES), splat(builder, scale, _LANES)
                for offset in range(0, 4 * PANEL, _LINE):
                    number = _load(builder, exact.at(builder, row).address, offset, _INTS, 4)
                    total = _pointer(builder, own_out.at(builder, row).address, offset, _FLOATS)
                    scaled = builder.fmul(builder.sitofp(builder.add(number, start), _FLOATS), scale)
                    builder.store(builder.fadd(builder.load(total, align=4), scaled), total, align=4)

    with_tiles(builder, count, add)


def _bits_8(builder: Any, at: Any, inputs: Any, scales: Any, sums: Any, block: Any, totals: Any) -> None:
    starts = [_load(builder, builder.add(row, builder.mul(block, _SIZE(4))), 0, _WORD, 4) for row in sums]
    exact = [[cgutils.alloca_once(builder, _INTS) for _ in range(_VECTORS)] for _ in inputs]
    for start, numbers in zip(starts, exact, strict=True):
        for number in numbers:
            builder.store(splat(builder, start, _LANES), number)
    with _groups(builder, block) as group:
        weights = builder.add(at, builder.mul(group, _SIZE(GROUP * PANEL)))
        own = [builder.add(row, builder.mul(group, _SIZE(GROUP))) for row in inputs]
        for k in range(GROUP // 4):
            panel = _panel(builder, weights, k)
            for row, numbers in zip(own, exact, strict=True):
                quad = splat(builder, _load(builder, row, 4 * k, _WORD, 4), _LANES)
                for vector, number in zip(panel, numbers, strict=True):
                    builder.store(_add_quads(builder, builder.load(number), vector, quad), number)
    for scale, numbers, row in zip(scales, exact, totals, strict=True):
        _add_scaled(builder, [builder.sitofp(builder.load(number), _FLOATS) for number in numbers], scale, block, row)


def _bits_4(builder: Any, at: Any, inputs: Any, scales: Any, sums: Any, block: Any, totals: Any) -> None:
    low, four = _all(_INTS, 0x0F0F0F0F), _all(_INTS, 4)
    with _groups(builder, block) as group:
        weights = builder.add(at, builder.mul(group, _SIZE(GROUP_BYTES)))
        own = [builder.add(row, builder.mul(group, _SIZE(GROUP))) for row in inputs]
        starts = [_load(builder, builder.add(row, builder.mul(group, _SIZE(4))), 0, _WORD, 4) for row in sums]
        exact = [[splat(builder, start, _LANES)] * _VECTORS for start in starts]
        for k in range(GROUP // 8):
            packed = _panel(builder, builder.add(weights, _SIZE(2 * PANEL)), k)
            highs = [builder.lshr(vector, four) for vector in packed]
            for half, panel in enumerate((packed, highs)):
                panel = [builder.and_(vector, low) for vector in panel]
                for row, numbers in zip(own, exact, strict=True):
                    quad = splat(builder, _load(builder, row, 8 * k + 4 * half, _WORD, 4), _LANES)
                    for v, vector in enumerate(panel):
                        numbers[v] = _add_quads(builder, numbers[v], vector, quad)
        for v in range(_VECTORS):
            stored = _load(builder, weights, 2 * _LANES * v, ir.VectorType(_HALF, _LANES), 2 * _LANES)
            scale = builder.bitcast(builder.shl(builder.zext(stored, _INTS), _all(_INTS, 16)), _FLOATS)
            for numbers in exact:
                numbers[v] = builder.fmul(builder.sitofp(numbers[v], _FLOATS), scale)
        for own_scales, floats, row in zip(scales, exact, totals, strict=True):
            _add_scaled(builder, floats, own_scales, block, row)


def _grouped(kind: Kind, builder: Any, at: Any, inputs: Any, scales: Any, sums: Any, block: Any, totals: Any) -> None:
    low, four = _all(_INTS, 0x0F0F0F0F), _all(_INTS, 4)
    with _groups(builder, block) as group:
        weights = builder.add(at, builder.mul(group, _SIZE(kind.group_bytes)))
        own = [builder.add(row, builder.mul(group, _SIZE(GROUP))) for row in inputs]
        halves = [builder.add(row, builder.mul(group, _SIZE(8))) for row in sums]
        pairs = [[_load(builder, row, 4 * half, _WORD, 4) for half in (0, 1)] for row in halves]
        wholes = [builder.add(*pair) for pair in pairs]
        numbers = builder.add(weights, _SIZE(4 * PANEL * (kind.scales + kind.has_minimum)))
        floats: list[list[Any]] = [[] for _ in inputs]
        for part in range(kind.scales):
            starts = wholes if kind.scales == 1 else [pair[part] for pair in pairs]
            # 8 bits have 128 more than the weight.
            starts = [builder.mul(start, _WORD(-128 if kind.bits == 8 else 0)) for start in starts]
            exact = [[splat(builder, start, _LANES)] * _VECTORS for start in starts]
            quads = GROUP // 4 // kind.scales
            for k in range(part * quads, (part + 1) * quads):
                panel = _panel(builder, numbers, k if kind.bits == 8 else k // 2)
                if kind.bits == 4:
                    panel = [builder.and_(builder.lshr(one, four) if k % 2 else one, low) for one in panel]
                for row, own_numbers in zip(own, exact, strict=True):
                    quad = splat(builder, _load(builder, row, 4 * k, _WORD, 4), _LANES)
                    for v, vector in enumerate(panel):
                        own_numbers[v] = _add_quads(builder, own_numbers[v], vector, quad)
            for v in range(_VECTORS):
                scale = _load(builder, weights, _LINE * (_VECTORS * part + v), _FLOATS, _LINE)
                for row_floats, own_numbers in zip(floats, exact, strict=True):
                    scaled = builder.fmul(builder.sitofp(own_numbers[v], _FLOATS), scale)
                    if part:
                        row_floats[v] = builder.fadd(row_floats[v], scaled)
                    else:
                        row_floats.append(scaled)
        if kind.has_minimum:
            for v in range(_VECTORS):
                minimum = _load(builder, weights, _LINE * (_VECTORS * kind.scales + v), _FLOATS, _LINE)
                for row_floats, whole in zip(floats, wholes, strict=True):
                    sum_ = splat(builder, builder.sitofp(whole, _FLOAT), _LANES)
                    row_floats[v] = builder.fsub(row_floats[v], builder.fmul(sum_, minimum))
        for own_scales, row_floats, row in zip(scales, floats, totals, strict=True):
            _add_scaled(builder, row_floats, own_scales, block, row)


@contextmanager
def _groups(builder: Any, block: Any) -> Iterator[Any]:
    """A loop over the groups of a block. Unrolled, 4-bit weights would be fetched ahead at half of the speed."""
    first = builder.mul(block, _SIZE(BLOCK // GROUP))
    end = builder.add(first, _SIZE(BLOCK // GROUP))
    with cgutils.for_range_slice(builder, first, end, _SIZE(1), _SIZE) as (group, _):
        yield group


def _add_scaled(builder: Any, floats: list[Any], scales: Any, block: Any, totals: list[Any]) -> None:
    """Adds a block's sums, times the scale of the row's inputs, to the totals."""
    scale = _load(builder, builder.add(scales, builder.mul(block, _SIZE(4))), 0, _FLOAT, 4)
    scale = splat(builder, scale, _LANES)
    for number, total in zip(floats, totals, strict=True):
        builder.store(builder.fadd(builder.load(total), builder.fmul(number, scale)), total)


def _add_quads(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """Adds, in each lane, four products of unsigned and signed bytes."""
    if _HAS_VNNI:
        quads = ir.VectorType(_BYTE, 4 * _LANES)
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", total, weights, inputs, quads)
    words, pairs = ir.VectorType(_HALF, 2 * _LANES), ir.VectorType(_WORD, 2 * _LANES)
    weights, inputs, eight = builder.bitcast(weights, words), builder.bitcast(inputs, words), _all(words, 8)
    even = builder.and_(weights, _all(words, 0xFF)), builder.ashr(builder.shl(inputs, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(inputs, eight)
    for own, other in (even, odd):  # In a form that LLVM knows as one instruction.
        products = builder.mul(builder.sext(own, pairs), builder.sext(other, pairs))
        halves = [
            builder.shuffle_vector(products, products, ir.Constant(_INTS, [*range(first, 2 * _LANES, 2)]))
            for first in (0, 1)
        ]
        total = builder.add(total, builder.add(*halves))
    return total


def _call(builder: Any, name: str, total: Any, weights: Any, inputs: Any, parts: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type, parts, parts])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(weights, parts), builder.bitcast(inputs, parts)])


def _panel(builder: Any, weights: Any, index: int) -> list[Any]:
    """The vectors of a panel at one place of the inputs."""
    return [_load(builder, weights, _LINE * (_VECTORS * index + v), _INTS, _LINE) for v in range(_VECTORS)]


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _SIZE(offset)), kind.as_pointer())


def _load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    return builder.load(_pointer(builder, address, offset, kind), align=align)


def _all(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count)
