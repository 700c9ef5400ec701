"""Building blocks of the compiled CPU kernels: number formats, weights from scores, and sums of weighted rows.

Numba compiles these to machine code. Numbers are stored as float32, or as bfloat16 in the form of its bits, uint16;
arithmetic is float32. `add_weighted_rows` and `exponentiate` are written for vectors: LLVM's own code keeps the sums in
memory (235 instead of 80 ns for 64 rows of 32 bfloat16) and computes exp number by number (3.3 instead of 0.25 ns for
one). So the order of their sums is fixed here and not by the compiler.

exp is 2^n times a polynomial of degree 6 (Cody and Waite's reduction), within 2e-7 of the true value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LANES = 16
_FEWER_LANES = 8  # The width of rows is a multiple of this.
_AT_ONCE = 2  # Rows that are added at once, to sums of their own: a single sum would wait for itself.
# For several queries at once, and for one: the lanes of a vector, and the vectors of a row that are added at once. All
# sums must fit into the registers. Neither changes the order of a sum.
_TOGETHER = 4  # Queries at once: each row is loaded once for them.
_SHAPE_TOGETHER = (16, 2) if get_host_cpu_features().get("avx512f") else (8, 1)
_SHAPE_ALONE = (_LANES, 2)

_SIZE = ir.IntType(64)
_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_LOWEST = -3e38
# Of exp: see the module.
LOG2_E = 1.4426950408889634
_SMALLEST_EXPONENT = -126.0
COEFFICIENTS = (
    *(1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3),
    *(5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0),
)


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


@intrinsic  # type: ignore[untyped-decorator]
def exponentiate(typing_context: Any, scores: Any) -> Any:
    """Replaces scores [n], contiguous float32, by e^(score - the highest); returns their sum. n is a multiple of 16.

    A power below 2^-126 becomes zero, and NaN remains. The order of the sum depends only on n.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        count = cgutils.unpack_tuple(builder, array.shape)[0]
        numbers = ir.VectorType(_FLOAT, _LANES)
        highest = cgutils.alloca_once_value(builder, ir.Constant(numbers, [_LOWEST] * _LANES))
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            larger = _larger(builder, builder.load(highest), _load(builder, array.data, at, _LANES))
            builder.store(larger, highest)
        largest = splat(builder, _reduce(builder, builder.load(highest), partial(_larger, builder)), _LANES)
        total = cgutils.alloca_once_value(builder, ir.Constant(numbers, [0.0] * _LANES))
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            powers = _exp(builder, builder.fsub(_load(builder, array.data, at, _LANES), largest))
            _store(builder, powers, array.data, at)
            builder.store(builder.fadd(builder.load(total), powers), total)
        return _reduce(builder, builder.load(total), builder.fadd)

    return types.float32(scores), generate


@intrinsic  # type: ignore[untyped-decorator]
def cap_numbers(typing_context: Any, numbers: Any, cap: Any) -> Any:
    """Replaces float32 numbers [n], contiguous, by cap * tanh(number / cap); n is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        count = cgutils.unpack_tuple(builder, array.shape)[0]
        vector = ir.VectorType(_FLOAT, _LANES)
        zero, one, minus_two = (ir.Constant(vector, [number] * _LANES) for number in (0.0, 1.0, -2.0))
        bound = splat(builder, arguments[1], _LANES)
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            number = builder.fdiv(_load(builder, array.data, at, _LANES), bound)
            negative = builder.fsub(zero, number)
            size = builder.select(builder.fcmp_ordered("<", number, negative), negative, number)
            # tanh of the size, which is the same without its sign.
            power = _exp(builder, builder.fmul(minus_two, size))
            part = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
            signed = builder.select(builder.fcmp_ordered("<", number, negative), builder.fsub(zero, part), part)
            _store(builder, builder.fmul(bound, signed), array.data, at)
        return context.get_dummy_value()

    return types.void(numbers, cap), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_squares(typing_context: Any, numbers: Any) -> Any:
    """The sum of the squares of float32 numbers [n], contiguous: 16 sums, then their halves. n is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        count = cgutils.unpack_tuple(builder, array.shape)[0]
        total = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(_FLOAT, _LANES), [0.0] * _LANES))
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            some = _load(builder, array.data, at, _LANES)
            builder.store(builder.fadd(builder.load(total), builder.fmul(some, some)), total)
        return _reduce(builder, builder.load(total), builder.fadd)

    return types.float32(numbers), generate


@intrinsic  # type: ignore[untyped-decorator]
def swish_times(typing_context: Any, gates: Any, ups: Any, out: Any) -> Any:
    """Writes gates / (1 + e^-gates) * ups; all float32 [n], contiguous. n is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gates, ups, out = (
            context.make_array(kind)(context, builder, array)
            for kind, array in zip(signature.args, arguments, strict=True)
        )
        count = cgutils.unpack_tuple(builder, out.shape)[0]
        numbers = ir.VectorType(_FLOAT, _LANES)
        zero, one = (ir.Constant(numbers, [number] * _LANES) for number in (0.0, 1.0))
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            gate, up = (_load(builder, array.data, at, _LANES) for array in (gates, ups))
            negative = builder.fsub(zero, gate)
            power = _exp(builder, builder.select(builder.fcmp_ordered("<", gate, negative), gate, negative))
            scaled = builder.select(builder.fcmp_ordered("<", gate, zero), builder.fmul(gate, power), gate)
            _store(builder, builder.fmul(builder.fdiv(scaled, builder.fadd(one, power)), up), out.data, at)
        return context.get_dummy_value()

    return types.void(gates, ups, out), generate


def _exp(builder: Any, x: Any) -> Any:
    """e^x for a vector x <= 0."""

    def all_lanes(number: float) -> Any:
        return ir.Constant(x.type, [number] * _LANES)

    words = ir.VectorType(_WORD, _LANES)
    unbounded = builder.fmul(x, all_lanes(LOG2_E))
    power = _larger(builder, all_lanes(_SMALLEST_EXPONENT), unbounded)
    whole = builder.fptosi(builder.fsub(power, all_lanes(0.5)), words)
    rest = builder.fsub(power, builder.sitofp(whole, x.type))
    series = all_lanes(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        product = builder.fmul(series, rest)
        series = builder.fadd(product, all_lanes(coefficient))
    exponent = builder.shl(builder.add(whole, ir.Constant(words, [127] * _LANES)), ir.Constant(words, [23] * _LANES))
    result = builder.fmul(series, builder.bitcast(exponent, x.type))
    too_small = builder.fcmp_ordered("<", unbounded, all_lanes(_SMALLEST_EXPONENT))
    return builder.select(too_small, all_lanes(0.0), result)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger numbers of two vectors, b's if that is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined: halves, then their halves."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        halves = (
            builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(_WORD, lanes), list(some)))
            for some in (range(lanes), range(lanes, 2 * lanes))
        )
        vector = combine(*halves)
    return builder.extract_element(vector, _WORD(0))


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to numbers of the type that the array `like` has."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def array_at(address: Any, shape: Any, like: Any) -> Any:
    """The contiguous array of a shape at an address, with the type of the array `like`.

    A tensor's address costs a tenth of its array.
    """
    return carray(_pointer(address, like), shape)


@intrinsic  # type: ignore[untyped-decorator]
def add_weighted_rows(typing_context: Any, weights: Any, rows: Any, sums: Any) -> Any:
    """Adds rows [n, m], each times its weight, to each of q sums: weights [q, n], sums [q, m], both float32.

    Every sum adds even rows and odd rows separately, then both, for any q. `rows`, and each row of `weights` and
    `sums`, is contiguous.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, rows, sums = (
            context.make_array(kind)(context, builder, array)
            for kind, array in zip(signature.args, arguments, strict=True)
        )
        queries, count = cgutils.unpack_tuple(builder, weights.shape)
        width = cgutils.unpack_tuple(builder, rows.shape)[1]
        together = builder.and_(queries, _SIZE(-_TOGETHER))
        for first, end, step in ((_SIZE(0), together, _TOGETHER), (together, queries, 1)):
            with cgutils.for_range_slice(builder, first, end, _SIZE(step), _SIZE) as (query, _):
                places = [builder.add(query, _SIZE(q)) for q in range(step)]
                own = [(_row(builder, weights, at), _row(builder, sums, at)) for at in places]
                lanes, vectors = _SHAPE_TOGETHER if step > 1 else _SHAPE_ALONE
                whole = builder.and_(width, _SIZE(-lanes * vectors))
                _sum_columns(builder, own, rows.data, count, width, _SIZE(0), whole, lanes, vectors)
                _sum_columns(builder, own, rows.data, count, width, whole, width, _FEWER_LANES, 1)
        return context.get_dummy_value()

    return types.void(weights, rows, sums), generate


def _row(builder: Any, array: Any, row: Any) -> Any:
    """A pointer to a row of an array."""
    stride = cgutils.unpack_tuple(builder, array.strides)[0]
    return cgutils.pointer_add(builder, array.data, builder.mul(row, stride))


def _sum_columns(
    builder: Any, own: list[Any], rows: Any, count: Any, width: Any, first: Any, end: Any, lanes: int, vectors: int
) -> None:
    """Emits the code for columns [first, end), `lanes` times `vectors` at once, of all pairs of weights and sums."""
    numbers = ir.VectorType(_FLOAT, lanes)
    zeros = ir.Constant(numbers, [0.0] * lanes)

    def add_row(row: Any, column: Any, parity: int) -> None:
        first = builder.add(builder.mul(row, width), column)
        loaded = [_load(builder, rows, builder.add(first, _SIZE(v * lanes)), lanes) for v in range(vectors)]
        for (weights, _), totals in zip(own, all_totals, strict=True):
            weight = splat(builder, builder.load(builder.gep(weights, [row])), lanes)
            for numbers, total in zip(loaded, totals[parity], strict=True):
                product = builder.fmul(weight, numbers)
                builder.store(builder.fadd(builder.load(total), product), total)

    with cgutils.for_range_slice(builder, first, end, _SIZE(lanes * vectors), _SIZE) as (column, _):
        all_totals = [
            [[cgutils.alloca_once(builder, numbers) for _ in range(vectors)] for _ in range(_AT_ONCE)] for _ in own
        ]
        for (_, sums), totals in zip(own, all_totals, strict=True):
            for v in range(vectors):
                builder.store(_load(builder, sums, builder.add(column, _SIZE(v * lanes)), lanes), totals[0][v])
                builder.store(zeros, totals[1][v])
        paired = builder.and_(count, _SIZE(-_AT_ONCE))
        with cgutils.for_range_slice(builder, _SIZE(0), paired, _SIZE(_AT_ONCE), _SIZE) as (row, _):
            for k in range(_AT_ONCE):
                add_row(builder.add(row, _SIZE(k)), column, k)
        with cgutils.for_range_slice(builder, paired, count, _SIZE(1), _SIZE) as (row, _):
            add_row(row, column, 0)
        for (_, sums), totals in zip(own, all_totals, strict=True):
            for v in range(vectors):
                total = builder.fadd(builder.load(totals[0][v]), builder.load(totals[1][v]))
                _store(builder, total, sums, builder.add(column, _SIZE(v * lanes)))


def _load(builder: Any, numbers: Any, at: Any, lanes: int) -> Any:
    """Loads a vector of stored numbers as float32."""
    stored = numbers.type.pointee
    pointer = builder.bitcast(builder.gep(numbers, [at]), ir.VectorType(stored, lanes).as_pointer())
    if stored == _FLOAT:
        return builder.load(pointer, align=4)
    words = ir.VectorType(_WORD, lanes)
    bits = builder.shl(builder.zext(builder.load(pointer, align=2), words), ir.Constant(words, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, lanes))


def _store(builder: Any, vector: Any, numbers: Any, at: Any) -> None:
    """Stores a vector among float32."""
    builder.store(vector, builder.bitcast(builder.gep(numbers, [at]), vector.type.as_pointer()), align=4)


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """A vector with one number in all lanes."""
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, _WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))
