"""The products of 4-bit weights, whose layout is in formats.py.

A weight times the factor of its group is an integer, so that a block's sum is exact in any order.
"""

from typing import Any

from numba.core import cgutils

from headrace_predictor.engine.cpu import emit
from headrace_predictor.engine.cpu.emit import FLOATS, INTS, SIZE, VECTORS, WORD, all_lanes
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, INT4_BYTES, INT4_SCALE, PANEL
from headrace_predictor.engine.cpu.vectors import splat


def int4(builder: Any, panel: Any, rows: list[emit.Row], block: Any) -> None:
    packed = emit.behind(builder, panel, block, INT4_BYTES)
    words = words_of(builder, packed)
    # Sums of integers, which are exact in float32: below 2^24.
    whole = [[cgutils.alloca_once(builder, FLOATS) for _ in range(VECTORS)] for _ in rows]
    for total in (total for own in whole for total in own):
        builder.store(all_lanes(FLOATS, 0.0), total)
    with emit.groups_of(builder, block) as group:
        place = builder.sub(group, builder.mul(block, SIZE(BLOCK // GROUP)))
        weights = emit.behind(builder, packed, place, GROUP // 2 * PANEL)
        own = [emit.behind(builder, row.inputs, group, GROUP) for row in rows]
        exact = [[emit.broadcast(builder, emit.behind(builder, row.sums, group, 4))] * VECTORS for row in rows]
        for k in range(GROUP // 8):
            for half, vectors in enumerate(halves_of(builder, weights, k)):
                for row, numbers in zip(own, exact, strict=True):
                    quad = emit.broadcast(builder, row, 8 * k + 4 * half)
                    for v, vector in enumerate(vectors):
                        numbers[v] = emit.add_quads(builder, numbers[v], vector, quad)
        for v, factor in enumerate(factors_of(builder, words, place)):
            factor = builder.sitofp(factor, FLOATS)
            for numbers, row in zip(exact, whole, strict=True):
                product = builder.fmul(builder.sitofp(numbers[v], FLOATS), factor, flags=("contract",))
                builder.store(builder.fadd(builder.load(row[v]), product, flags=("contract",)), row[v])
    units = units_of(builder, packed)
    for row, own_whole in zip(rows, whole, strict=True):
        floats = [builder.fmul(builder.load(total), unit) for total, unit in zip(own_whole, units, strict=True)]
        emit.add_scaled(builder, floats, row, block)


def halves_of(builder: Any, weights: Any, index: int, **ahead: int) -> tuple[list[Any], list[Any]]:
    """The vectors of a panel at one place, and at the next one."""
    both = emit.read_panel(builder, builder.add(weights, SIZE(4 * PANEL)), index, **ahead)
    low, four = all_lanes(INTS, 0x0F0F0F0F), all_lanes(INTS, 4)
    highs = [builder.lshr(vector, four) for vector in both]
    return [builder.and_(vector, low) for vector in both], [builder.and_(vector, low) for vector in highs]


def words_of(builder: Any, packed: Any) -> list[Any]:
    """The words of a block of 4 bits: its scales and factors."""
    return [emit.load(builder, packed, emit.LINE * v, INTS, emit.LINE) for v in range(VECTORS)]


def units_of(builder: Any, packed: Any) -> list[Any]:
    """The scales of a block of 4 bits."""
    upper = all_lanes(INTS, INT4_SCALE)
    return [builder.bitcast(builder.and_(word, upper), FLOATS) for word in words_of(builder, packed)]


def factors_of(builder: Any, words: list[Any], group: Any) -> list[Any]:
    """The factors of a group of the block: of 5 bits, with a sign."""
    shift = builder.sub(WORD(27), builder.mul(WORD(5), builder.trunc(group, WORD)))
    shift = splat(builder, shift, emit.LANES)
    return [builder.ashr(builder.shl(word, shift), all_lanes(INTS, 27)) for word in words]
