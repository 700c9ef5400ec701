"""What the code of products is made of: reads of a panel, products of bytes in fours, sums with their scales."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP
from headrace_predictor.engine.cpu.pairs import FEATURES, Rows, fetch_soon
from headrace_predictor.engine.cpu.vectors import splat

VECTORS, LANES = 4, 16  # A panel in vectors of 32-bit numbers.
LINE = 64  # Bytes of a vector.

SIZE, BYTE, HALF_WORD, WORD = (ir.IntType(bits) for bits in (64, 8, 16, 32))
FLOAT = ir.FloatType()
INTS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)

_HAS_VNNI = "avx512vnni" in FEATURES


class Operands(NamedTuple):
    """Of a product, in LLVM's values: see `multiply`."""

    panel: Any
    inputs: Rows
    scales: Rows
    sums: Rows
    blocks: Any
    out: Rows


class Row(NamedTuple):
    """Of a product: a row's addresses of inputs, scales and sums, and its vectors of results."""

    inputs: Any
    scales: Any
    sums: Any
    totals: list[Any]


@contextmanager
def loop(builder: Any, count: Any) -> Iterator[Any]:
    """A loop over so many numbers."""
    with cgutils.for_range_slice(builder, SIZE(0), count, SIZE(1), SIZE) as (number, _):
        yield number


@contextmanager
def groups_of(builder: Any, block: Any) -> Iterator[Any]:
    """A loop over the groups of a block. Unrolled, 4-bit weights of one row come at two thirds of the speed."""
    first = builder.mul(block, SIZE(BLOCK // GROUP))
    end = builder.add(first, SIZE(BLOCK // GROUP))
    with cgutils.for_range_slice(builder, first, end, SIZE(1), SIZE) as (group, _):
        yield group


def add_scaled(builder: Any, floats: list[Any], row: Row, block: Any) -> None:
    """Adds a block's sums, times the scale of the row's inputs, to the totals."""
    scale = broadcast(builder, behind(builder, row.scales, block, 4), kind=FLOAT)
    for number, total in zip(floats, row.totals, strict=True):
        builder.store(builder.fadd(builder.load(total), builder.fmul(number, scale)), total)


def add_quads(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """Adds, in each lane, four products of unsigned and signed bytes."""
    if _HAS_VNNI:
        quads = ir.VectorType(BYTE, 4 * LANES)
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", total, weights, inputs, quads)
    words, pairs = ir.VectorType(HALF_WORD, 2 * LANES), ir.VectorType(WORD, 2 * LANES)
    weights, inputs, eight = builder.bitcast(weights, words), builder.bitcast(inputs, words), all_lanes(words, 8)
    even = builder.and_(weights, all_lanes(words, 0xFF)), builder.ashr(builder.shl(inputs, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(inputs, eight)
    for own, other in (even, odd):  # In a form that LLVM knows as one instruction.
        products = builder.mul(builder.sext(own, pairs), builder.sext(other, pairs))
        halves = [
            builder.shuffle_vector(products, products, ir.Constant(INTS, [*range(first, 2 * LANES, 2)]))
            for first in (0, 1)
        ]
        total = builder.add(total, builder.add(*halves))
    return total


def _call(builder: Any, name: str, total: Any, weights: Any, inputs: Any, parts: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type, parts, parts])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(weights, parts), builder.bitcast(inputs, parts)])


def read_panel(builder: Any, weights: Any, index: int, **ahead: int) -> list[Any]:
    """The vectors of a panel at one place of the inputs; what is `ahead` of them is fetched."""
    places = [LINE * (VECTORS * index + v) for v in range(VECTORS)]
    for place in places:
        fetch_soon(builder, builder.add(weights, SIZE(place)), **ahead)
    return [load(builder, weights, place, INTS, LINE) for place in places]


def broadcast(builder: Any, address: Any, offset: int = 0, kind: Any = WORD) -> Any:
    """A number of 32 bits in memory, in all lanes."""
    return splat(builder, load(builder, address, offset, kind, 4), LANES)


def behind(builder: Any, address: Any, count: Any, size: int) -> Any:
    """The address behind so many things of a size."""
    return builder.add(address, builder.mul(count, SIZE(size)))


def pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, SIZE(offset)), kind.as_pointer())


def load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    return builder.load(pointer(builder, address, offset, kind), align=align)


def all_lanes(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * kind.count)
