"""Products of a panel by the tiles of AMX, for any number of rows: of bytes, and what all formats fetch ahead."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from headrace_predictor.engine.cpu import emit
from headrace_predictor.engine.cpu.emit import FLOATS, INTS, LANES, LINE, SIZE, VECTORS, all_lanes
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, INT4_BYTES, PANEL
from headrace_predictor.engine.cpu.int4 import factors_of, halves_of, units_of, words_of
from headrace_predictor.engine.cpu.pairs import STEP, TILES_ROWS, Ahead, Rows, add_tiles, with_tiles

STEP_BYTES = 2 * PANEL * STEP  # Of the weights that a step of tiles reads.
_STEPS = SIZE(BLOCK // (2 * STEP))  # Of a block of bytes.
_MOST_LINES = 16  # That a step of two tiles fetches: more hold up its products of bfloat16.
_UNPACKED = 8  # Blocks of 4-bit weights that tiles read from memory of the thread; one for few rows.

# Gets a block; returns what makes floats of a token's exact sums in it.
Conversion = Callable[[Any], Callable[[Any, list[Any]], list[Any]]]


def ahead_of(builder: Any, tiles: int, panel: Any, steps: Any, row: Any, count: Any) -> Ahead:
    """What `steps` of these rows fetch: of one tile what its next step reads, of two a part of the weights behind."""
    if tiles == 1:
        return Ahead(builder.add(panel, SIZE(STEP_BYTES)), SIZE(STEP_BYTES), cache=1)
    return part_behind(builder, panel, steps, row, count, TILES_ROWS, halves=2)


def part_behind(builder: Any, panel: Any, steps: Any, row: Any, count: Any, together: int, halves: int = 1) -> Ahead:
    """What `steps` of the rows from `row` on fetch of the weights behind, of `count` rows, `together` at once."""
    parts = builder.udiv(builder.add(count, SIZE(together - 1)), SIZE(together))
    lines = builder.udiv(builder.add(parts, SIZE(STEP_BYTES // halves // LINE - 1)), parts)
    each = builder.mul(_smaller(builder, lines, SIZE(_MOST_LINES)), SIZE(LINE))
    part = builder.mul(builder.udiv(row, SIZE(together)), builder.mul(each, SIZE(halves)))
    own = builder.mul(steps, builder.add(part, SIZE(STEP_BYTES)))
    return Ahead(builder.add(panel, own), each, cache=2, stride=builder.mul(steps, each))


def add_panel(
    builder: Any, tiles: int, steps: Any, inputs: Rows, weights: Rows, sums: Rows, ahead: Ahead | None, **how: Any
) -> None:
    """`add_tiles` for the columns of a panel.

    Weights are fetched ahead, which the processor itself does too late: each half of two tiles fetches its part.
    """
    across = 4 // tiles  # Few rows read the weights in the order of their memory.
    for column in range(0, 4 * PANEL, 64 * across):
        right, out = (rows.at(builder, SIZE(0), column) for rows in (weights, sums))
        own = ahead._replace(address=builder.add(ahead.address, ahead.stride)) if ahead and column else ahead
        add_tiles(builder, tiles, across, steps, inputs, right, out, ahead=own, **how)


def _multiply_bytes(
    builder: Any, count: Any, own: emit.Operands, converted: Conversion, *, instruction: str, is_fetched: bool
) -> None:
    """Adds a block's exact sums, which `converted` makes floats, times the scale of each row's inputs."""
    memory = cgutils.alloca_once(builder, ir.ArrayType(INTS, VECTORS * TILES_ROWS))
    exact = Rows(builder.ptrtoint(memory, SIZE), SIZE(4 * PANEL))

    def add(first: Any, tiles: int) -> None:
        ahead = ahead_of(builder, tiles, own.panel, builder.mul(own.blocks, _STEPS), first, count)
        many = _smaller(builder, builder.sub(count, first), SIZE(TILES_ROWS))
        out = own.out.at(builder, first)
        with emit.loop(builder, own.blocks) as block:
            left = own.inputs.at(builder, first, builder.mul(block, SIZE(BLOCK)))
            right = Rows(emit.behind(builder, own.panel, block, BLOCK * PANEL), SIZE(4 * PANEL))
            fetched = ahead.behind(builder, builder.mul(block, _STEPS)) if is_fetched else None
            add_panel(builder, tiles, _STEPS, left, right, exact, fetched, is_new=True, instruction=instruction)
            floats_of = converted(block)
            with emit.loop(builder, many) as row:
                token = builder.add(first, row)
                place = own.scales.at(builder, token, builder.mul(block, SIZE(4))).address
                scale = emit.broadcast(builder, place, kind=emit.FLOAT)
                sums = exact.at(builder, row).address
                numbers = [emit.load(builder, sums, LINE * v, INTS, 4) for v in range(VECTORS)]
                for v, number in enumerate(floats_of(token, numbers)):
                    total = emit.pointer(builder, out.at(builder, row).address, LINE * v, FLOATS)
                    sum_ = builder.fadd(builder.load(total, align=4), builder.fmul(number, scale))
                    builder.store(sum_, total, align=4)

    with_tiles(builder, count, add)


def int8_by_tiles(builder: Any, count: Any, own: emit.Operands) -> None:
    """The sums of `_bits_8`, bit by bit, for any number of rows."""

    def converted(block: Any) -> Callable[[Any, list[Any]], list[Any]]:
        def floats_of(token: Any, numbers: list[Any]) -> list[Any]:
            start = emit.broadcast(builder, own.sums.at(builder, token, builder.mul(block, SIZE(4))).address)
            return [builder.sitofp(builder.add(number, start), FLOATS) for number in numbers]

        return floats_of

    _multiply_bytes(builder, count, own, converted, instruction="tdpbsud", is_fetched=True)


def int4_by_tiles(builder: Any, count: Any, own: emit.Operands) -> None:
    """The sums of `int4`, bit by bit, for any number of rows: unpacks some blocks to bytes, in memory of its own."""
    memory = cgutils.alloca_once(builder, ir.ArrayType(INTS, _UNPACKED * BLOCK * PANEL // LINE))
    unpacked = builder.ptrtoint(memory, SIZE)
    most = builder.select(builder.icmp_unsigned(">", count, SIZE(2 * TILES_ROWS)), SIZE(_UNPACKED), SIZE(1))
    with cgutils.for_range_slice(builder, SIZE(0), own.blocks, most, SIZE) as (first, _):
        some = _smaller(builder, builder.sub(own.blocks, first), most)
        packed = emit.behind(builder, own.panel, first, INT4_BYTES)
        with emit.loop(builder, some) as block:
            target = emit.behind(builder, unpacked, block, BLOCK * PANEL)
            _unpack(builder, emit.behind(builder, packed, block, INT4_BYTES), target)

        def converted(block: Any) -> Callable[[Any, list[Any]], list[Any]]:
            units = units_of(builder, emit.behind(builder, packed, block, INT4_BYTES))
            return lambda _, numbers: [
                builder.fmul(builder.sitofp(number, FLOATS), unit) for number, unit in zip(numbers, units, strict=True)
            ]

        part = own._replace(
            panel=unpacked,
            inputs=own.inputs.at(builder, SIZE(0), builder.mul(first, SIZE(BLOCK))),
            scales=own.scales.at(builder, SIZE(0), builder.mul(first, SIZE(4))),
            blocks=some,
        )
        _multiply_bytes(builder, count, part, converted, instruction="tdpbssd", is_fetched=False)


def _unpack(builder: Any, packed: Any, target: Any) -> None:
    """Unpacks a block of 4 bits to signed bytes [BLOCK / 4, PANEL, 4]: weights times their factors."""
    words, pairs = words_of(builder, packed), ir.VectorType(emit.HALF_WORD, 2 * LANES)
    quads = ir.VectorType(emit.BYTE, 4 * LANES)
    with emit.loop(builder, SIZE(BLOCK // GROUP)) as group:
        weights = emit.behind(builder, packed, group, GROUP // 2 * PANEL)
        out = emit.behind(builder, target, group, GROUP * PANEL)
        # A half times a size has 8 bits. Then (8 + weight) * factor becomes weight * factor.
        sizes, signs, rests = [], [], []
        for factor in factors_of(builder, words, group):
            sign = builder.ashr(factor, all_lanes(INTS, 31))
            size = builder.sub(builder.xor(factor, sign), sign)
            rest = builder.sub(builder.mul(factor, all_lanes(INTS, -8)), sign)
            sizes.append(builder.bitcast(builder.mul(size, all_lanes(INTS, 0x00010001)), pairs))
            signs.append(sign)
            rest = builder.mul(builder.and_(rest, all_lanes(INTS, 0xFF)), all_lanes(INTS, 0x01010101))
            rests.append(builder.bitcast(rest, quads))
        for k in range(GROUP // 8):
            for half, vectors in enumerate(halves_of(builder, weights, k, after=2 * INT4_BYTES, cache=2)):
                for v, number in enumerate(vectors):
                    number = builder.mul(builder.bitcast(number, pairs), sizes[v])
                    number = builder.xor(builder.bitcast(number, INTS), signs[v])
                    number = builder.add(builder.bitcast(number, quads), rests[v])
                    place = emit.pointer(builder, out, LINE * (VECTORS * (2 * k + half) + v), quads)
                    builder.store(number, place, align=LINE)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", a, b), a, b)
