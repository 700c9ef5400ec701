"""Building blocks of the compiled CPU kernels: number formats, exp, and sums of weighted rows.

Numba compiles these to machine code. Numbers are stored as float32, or as bfloat16 in the form of its bits, uint16;
arithmetic is float32. `add_weighted_rows` is written for vectors of 16 because LLVM's own code keeps the sums in
memory: that was three times as slow (235 instead of 80 ns for 64 rows of 32 bfloat16).

exp is 2^n times a polynomial of degree 6 (Cody and Waite's reduction), within 2e-7 of the true value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LANES = 16
_FEWER_LANES = 8  # The width of rows is a multiple of this.
_SIDE_BY_SIDE = 2  # Vectors of a row, and rows, that are summed at once: a single sum would wait for itself.
_CONTRACT = ("contract",)  # A product and a sum may become one instruction.

_SIZE = ir.IntType(64)
_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_LOG2_E = np.float32(1.4426950408889634)
_SMALLEST_EXPONENT = np.float32(-126)
_C6 = np.float32(1.535336188319500e-4)
_C5 = np.float32(1.339887440266574e-3)
_C4 = np.float32(9.618437357674640e-3)
_C3 = np.float32(5.550332471162809e-2)
_C2 = np.float32(2.402264791363012e-1)
_C1 = np.float32(6.931472028550421e-1)


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(typing_context: Any, bits: Any) -> Any:
    """Reinterprets 32 bits as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing_context: Any, stored: Any) -> Any:
    """Converts a stored number to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], _WORD), ir.Constant(_WORD, 16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing_context: Any, number: Any, like: Any) -> Any:
    """Converts a float32 to the type of `like`, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        bits = builder.bitcast(arguments[0], _WORD)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_WORD, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_WORD, 16)), ir.IntType(16))

    return like(types.float32, like), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e^x for x <= 0."""
    power = max(x * _LOG2_E, _SMALLEST_EXPONENT)
    whole = np.int32(power - _HALF)
    rest = power - np.float32(whole)
    series = _C6
    series = series * rest + _C5
    series = series * rest + _C4
    series = series * rest + _C3
    series = series * rest + _C2
    series = series * rest + _C1
    series = series * rest + _ONE
    return series * _float_of(np.uint32((whole + np.int32(127)) << np.int32(23)))


@intrinsic  # type: ignore[untyped-decorator]
def add_weighted_rows(typing_context: Any, weights: Any, rows: Any, sums: Any) -> Any:
    """Adds rows [n, m], each times its weight [n], to sums [m]: even rows and odd rows separately, then both.

    All are contiguous; weights and sums are float32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, array)
            for kind, array in zip(signature.args, arguments, strict=True)
        ]
        count = cgutils.unpack_tuple(builder, arrays[0].shape)[0]
        width = cgutils.unpack_tuple(builder, arrays[2].shape)[0]
        block = _LANES * _SIDE_BY_SIDE
        whole = builder.and_(width, _SIZE(-block))
        data = [array.data for array in arrays]
        _sum_columns(builder, data, count, width, _SIZE(0), whole, _LANES, _SIDE_BY_SIDE)
        _sum_columns(builder, data, count, width, whole, width, _FEWER_LANES, 1)
        return context.get_dummy_value()

    return types.void(weights, rows, sums), generate


def _sum_columns(
    builder: Any, data: Any, count: Any, width: Any, first: Any, end: Any, lanes: int, vectors: int
) -> None:
    """Emits the code for columns [first, end), `lanes` times `vectors` of them at once."""
    weights, rows, sums = data
    numbers = ir.VectorType(_FLOAT, lanes)
    zeros = ir.Constant(numbers, [0.0] * lanes)

    def add_row(row: Any, column: Any, totals: list[Any]) -> None:
        weight = _splat(builder, builder.load(builder.gep(weights, [row])), lanes)
        for v, total in enumerate(totals):
            at = builder.add(builder.add(builder.mul(row, width), column), _SIZE(v * lanes))
            product = builder.fmul(weight, _load(builder, rows, at, lanes), flags=_CONTRACT)
            builder.store(builder.fadd(builder.load(total), product, flags=_CONTRACT), total)

    with cgutils.for_range_slice(builder, first, end, _SIZE(lanes * vectors), _SIZE) as (column, _):
        totals = [[cgutils.alloca_once(builder, numbers) for _ in range(vectors)] for _ in range(_SIDE_BY_SIDE)]
        for v, total in enumerate(totals[0]):
            builder.store(_load(builder, sums, builder.add(column, _SIZE(v * lanes)), lanes), total)
        for total in totals[1]:
            builder.store(zeros, total)
        paired = builder.and_(count, _SIZE(-_SIDE_BY_SIDE))
        with cgutils.for_range_slice(builder, _SIZE(0), paired, _SIZE(_SIDE_BY_SIDE), _SIZE) as (row, _):
            for k in range(_SIDE_BY_SIDE):
                add_row(builder.add(row, _SIZE(k)), column, totals[k])
        with cgutils.for_range_slice(builder, paired, count, _SIZE(1), _SIZE) as (row, _):
            add_row(row, column, totals[0])
        for v in range(vectors):
            total = builder.fadd(builder.load(totals[0][v]), builder.load(totals[1][v]))
            target = builder.gep(sums, [builder.add(column, _SIZE(v * lanes))])
            builder.store(total, builder.bitcast(target, numbers.as_pointer()), align=4)


def _load(builder: Any, numbers: Any, at: Any, lanes: int) -> Any:
    """Loads a vector of stored numbers as float32."""
    stored = numbers.type.pointee
    pointer = builder.bitcast(builder.gep(numbers, [at]), ir.VectorType(stored, lanes).as_pointer())
    if stored == _FLOAT:
        return builder.load(pointer, align=4)
    words = ir.VectorType(_WORD, lanes)
    bits = builder.shl(builder.zext(builder.load(pointer, align=2), words), ir.Constant(words, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, lanes))


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    """A vector with one number in all lanes."""
    undefined = ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, _WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))
