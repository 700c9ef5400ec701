"""Products of bfloat16 numbers, by the processor's instruction: of matrices (AMX) or of vectors (AVX512_BF16).

A matrix [n, m] lies in pairs, in panels of some columns: each is uint32 [n / 2, columns], with the bits of two rows,
and n is a multiple of STEP. Sums are float32. A sum has one order, that of the instruction, for any number of rows, and
products with zero change nothing. Both instructions take numbers below 2^-126 as zero.

A tile of AMX is 16 rows of 64 bytes. Each call configures the tiles of its thread and releases them, as oneDNN does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from headrace_predictor.engine.cpu.tiles import HAS_TILES
from headrace_predictor.engine.cpu.vectors import splat

STEP = 32
PANEL_COLUMNS = 32  # Of `write_products` and `add_products`.
_LANES = 16
_TILE = 16  # Rows of a tile.
TILES_ROWS = 2 * _TILE  # Rows that read the pairs together.
_VECTOR_ROWS = 8  # … by the instruction for vectors.
_FEW_ROWS = 4  # … that pair what they read themselves.
_SOON = 1024  # Bytes that few rows read before those that they fetch.

_SIZE, _BYTE, _HALF, _WORD = (ir.IntType(bits) for bits in (64, 8, 16, 32))
_POINTER = _BYTE.as_pointer()
_INTS, _FLOATS, _HALVES = (ir.VectorType(kind, _LANES) for kind in (_WORD, ir.FloatType(), _HALF))


def _features() -> set[str]:
    """What the processor has that code is compiled for, as Numba chooses it."""
    if config.CPU_FEATURES is not None:
        return {word[1:] for word in config.CPU_FEATURES.split(",") if word.startswith("+")}
    return {name for name, has in get_host_cpu_features().items() if has}


FEATURES = _features()
HAS_BF16 = "avx512bf16" in FEATURES
HAS_MATRICES = HAS_BF16 and "amx-bf16" in FEATURES and HAS_TILES
HAS_BYTE_MATRICES = "amx-int8" in FEATURES and HAS_TILES
# AMD's Zen follows a stream across pages by itself: with these instructions, one row of 4-bit weights came at 0.64 of
# what the memory gives, and without them at 0.85 (8 bits: 0.82 and 0.9; bfloat16: 0.7 and 0.82).
_FETCHES_SOON = not get_host_cpu_name().startswith("znver")


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Rows(NamedTuple):
    """Rows in memory, in LLVM's values: the address of the first, and the bytes from one to the next."""

    address: Any
    stride: Any

    def at(self, builder: Any, row: Any, column: int | Any = 0) -> Rows:
        """The rows from `row` on, without the first `column` bytes of each."""
        column = _SIZE(column) if isinstance(column, int) else column
        return Rows(builder.add(builder.add(self.address, builder.mul(row, self.stride)), column), self.stride)

    def pointer(self, builder: Any, kind: Any) -> Any:
        """A pointer to the first row."""
        return builder.inttoptr(self.address, kind.as_pointer())


def _rows_of(context: Any, builder: Any, signature: Any, arguments: Any) -> list[tuple[Rows, list[Any]]]:
    """The rows of arrays, by the stride of their last axis but one or of the only one, and their shapes."""
    found = []
    for kind, argument in zip(signature.args, arguments, strict=True):
        array = context.make_array(kind)(context, builder, argument)
        stride = cgutils.unpack_tuple(builder, array.strides)[-2:][0]
        found.append((Rows(builder.ptrtoint(array.data, _SIZE), stride), cgutils.unpack_tuple(builder, array.shape)))
    return found


class Ahead(NamedTuple):
    """What steps fetch of the weights to come, in LLVM's values: the address, and the bytes of each; to which cache.

    Of half a panel's columns: the other half begins `stride` bytes behind."""

    address: Any
    bytes: Any
    cache: int
    stride: Any = None

    def behind(self, builder: Any, step: Any) -> Ahead:
        return self._replace(address=builder.add(self.address, builder.mul(step, self.bytes)))

    def fetch(self, builder: Any, step: Any) -> None:
        """Emits the fetching of a step."""
        own = self.behind(builder, step).address
        with cgutils.for_range_slice(builder, _SIZE(0), self.bytes, _SIZE(64), _SIZE) as (line, _):
            _fetch(builder, builder.add(own, line), self.cache)


def fetch_soon(builder: Any, address: Any, after: int = _SOON, cache: int = 1) -> None:
    """Emits the fetching of what is read `after` bytes behind the line at an address, if the processor needs it."""
    if _FETCHES_SOON:
        _fetch(builder, builder.add(address, _SIZE(after)), cache)


def _fetch(builder: Any, address: Any, cache: int) -> None:
    flags = (_WORD(0), _WORD(4 - cache), _WORD(1))  # To read data, which need not be there.
    _call(builder, "llvm.prefetch.p0i8", builder.inttoptr(address, _POINTER), *flags)


@intrinsic  # type: ignore[untyped-decorator]
def product_type(typing_context: Any, numbers: Any, stored: Any) -> Any:
    """Zero of bfloat16's type if both arrays have it and the processor multiplies it, else of float32."""
    both = numbers.dtype == stored.dtype == types.uint16
    result = types.uint16 if HAS_BF16 and both else types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(result, 0)

    return result(numbers, stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow_row(typing_context: Any, numbers: Any, target: Any) -> Any:
    """Writes float32 numbers [n] as bfloat16, which may begin in memory of theirs; n is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (source, (count,)), (out, _) = _rows_of(context, builder, signature, arguments)
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(_LANES), _SIZE) as (at, _):
            wide = builder.load(source.at(builder, at).pointer(builder, _FLOATS), align=4)
            narrow = builder.bitcast(builder.fptrunc(wide, ir.VectorType(_BFloat(), _LANES)), _HALVES)
            builder.store(narrow, out.at(builder, at).pointer(builder, _HALVES), align=2)
        return context.get_dummy_value()

    return types.void(numbers, target), generate


@intrinsic  # type: ignore[untyped-decorator]
def pair_rows(typing_context: Any, stored: Any, pairs: Any) -> Any:
    """Writes the first PANEL_COLUMNS columns of bfloat16 rows [2 n, m] to pairs [n, PANEL_COLUMNS]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (rows, _), (out, (count, _)) = _rows_of(context, builder, signature, arguments)
        with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(1), _SIZE) as (k, _):
            own = rows.at(builder, builder.mul(k, _SIZE(2)))
            for at in range(0, PANEL_COLUMNS, _LANES):
                both = _pair(builder, own, at)
                builder.store(both, out.at(builder, k, 4 * at).pointer(builder, _INTS), align=4)
        return context.get_dummy_value()

    return types.void(stored, pairs), generate


def _pair(builder: Any, rows: Rows, column: int) -> Any:
    """Numbers of two rows, from a column on, in pairs."""
    places = (rows.at(builder, _SIZE(i), 2 * column).pointer(builder, _HALVES) for i in range(2))
    low, high = (builder.zext(builder.load(place, align=2), _INTS) for place in places)
    return builder.or_(low, builder.shl(high, ir.Constant(_INTS, [16] * _LANES)))


def _products(is_new: bool) -> Any:
    """The operation that writes products, or adds them."""

    @intrinsic  # type: ignore[untyped-decorator]
    def compute(typing_context: Any, weights: Any, pairs: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (left, (count, _)), (right, (panels, halves, _)), (out, _) = _rows_of(
                context, builder, signature, arguments
            )
            steps = builder.udiv(halves, _SIZE(STEP // 2))

            def add(row: Any, number: int, emit: Callable[..., None]) -> None:
                with cgutils.for_range_slice(builder, _SIZE(0), panels, _SIZE(1), _SIZE) as (panel, _):
                    own = right.at(builder, builder.mul(panel, halves))
                    target = out.at(builder, row, builder.mul(panel, _SIZE(4 * PANEL_COLUMNS)))
                    emit(builder, number, 2, steps, left.at(builder, row), own, target, is_new=is_new)

            if HAS_MATRICES:
                with_tiles(builder, count, partial(add, emit=add_tiles))
            else:
                with_rows(builder, count, _VECTOR_ROWS, partial(add, emit=add_vectors))
            return context.get_dummy_value()

        return types.void(weights, pairs, sums), generate

    return compute


@intrinsic  # type: ignore[untyped-decorator]
def add_row_products(typing_context: Any, weights: Any, rows: Any, sums: Any, following: Any) -> Any:
    """`add_products` of a matrix [n, m] not in pairs: every _FEW_ROWS rows of weights [q, n] pair it in registers.

    Vectors only; m is a multiple of PANEL_COLUMNS. `following`: the address of what is read next, of the same size.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = _rows_of(context, builder, signature.replace(args=signature.args[:3]), arguments[:3])
        (left, (count, _)), (right, (length, columns)), (out, _) = arrays
        steps, panels = builder.udiv(length, _SIZE(STEP)), builder.udiv(columns, _SIZE(PANEL_COLUMNS))
        each = builder.mul(_SIZE(2 * PANEL_COLUMNS), _SIZE(STEP))

        def add(row: Any, number: int) -> None:
            with cgutils.for_range_slice(builder, _SIZE(0), panels, _SIZE(1), _SIZE) as (panel, _):
                own = right.at(builder, _SIZE(0), builder.mul(panel, _SIZE(2 * PANEL_COLUMNS)))
                target = out.at(builder, row, builder.mul(panel, _SIZE(4 * PANEL_COLUMNS)))
                ahead = Ahead(arguments[3], each, cache=2).behind(builder, builder.mul(panel, steps))
                add_vectors(builder, number, 2, steps, left.at(builder, row), own, target, ahead=ahead, in_pairs=False)

        with_rows(builder, count, _FEW_ROWS, add)
        return context.get_dummy_value()

    return types.void(weights, rows, sums, types.int64), generate


# Of weights [q, n], bfloat16, and a matrix [n, m] in pairs [m / PANEL_COLUMNS, n / 2, PANEL_COLUMNS] to float32
# [q, m]; rows are contiguous.
write_products, add_products = _products(is_new=True), _products(is_new=False)


def with_tiles(builder: Any, rows: Any, emit: Callable[[Any, int], None]) -> None:
    """Emits code for so many rows, TILES_ROWS at once: `emit` gets the first row and the number of its tiles."""
    whole = _SIZE(_TILE)
    memory = builder.bitcast(cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64)), _POINTER)
    with cgutils.for_range_slice(builder, _SIZE(0), rows, _SIZE(TILES_ROWS), _SIZE) as (row, _):
        left = builder.sub(rows, row)
        has_two = builder.icmp_unsigned(">", left, whole)
        is_full = builder.icmp_unsigned(">=", left, _SIZE(TILES_ROWS))
        with builder.if_then(builder.or_(builder.icmp_unsigned("==", row, _SIZE(0)), builder.not_(is_full))):
            rest = builder.select(is_full, whole, builder.sub(left, whole))
            first, upper, other = (
                builder.select(has_two, *pair) for pair in ((whole, left), (rest, left), (rest, whole))
            )
            cgutils.memset(builder, memory, _SIZE(64), 0)
            builder.store(_BYTE(1), memory)  # The palette.
            # Sums 0 to 3; weights 4 and, of two tiles, 5; pairs up to 7.
            for tile, own in enumerate((first, first, upper, upper, first, other, whole, whole)):
                builder.store(_BYTE(64), builder.gep(memory, [_SIZE(16 + 2 * tile)]))
                builder.store(builder.trunc(own, _BYTE), builder.gep(memory, [_SIZE(48 + tile)]))
            _call(builder, "llvm.x86.ldtilecfg", memory)
        with builder.if_else(has_two) as (two, one):
            with two:
                emit(row, 2)
            with one:
                emit(row, 1)
    _call(builder, "llvm.x86.tilerelease")


def with_rows(builder: Any, rows: Any, most: int, emit: Callable[[Any, int], None]) -> None:
    """Emits code for so many rows, `most` at once: `emit` gets the first row and the number of rows."""
    rest = builder.urem(rows, _SIZE(most))
    with cgutils.for_range_slice(builder, _SIZE(0), builder.sub(rows, rest), _SIZE(most), _SIZE) as (row, _):
        emit(row, most)
    for number in range(1, most):
        with builder.if_then(builder.icmp_unsigned("==", rest, _SIZE(number))):
            emit(builder.sub(rows, rest), number)


def add_tiles(
    builder: Any,
    tiles: int,
    across: int,
    steps: Any,
    left: Rows,
    right: Rows,
    out: Rows,
    *,
    ahead: Ahead | None = None,
    is_new: bool = False,
    instruction: str = "tdpbf16ps",
) -> None:
    """Emits the code for `tiles` times `across` tiles of sums, four at most, over `steps` times STEP rows.

    By `tdpbsud` products of bytes, signed on the left and unsigned on the right in fours, over twice as many rows.
    """
    sums = {
        (i, j): (_BYTE(2 * i + j), out.at(builder, _SIZE(_TILE * i), 64 * j))
        for i in range(tiles)
        for j in range(across)
    }
    for tile, place in sums.values():
        if is_new:
            _call(builder, "llvm.x86.tilezero", tile)
        else:
            _load_tile(builder, tile, place)
    with cgutils.for_range_slice(builder, _SIZE(0), steps, _SIZE(1), _SIZE) as (step, _):
        if ahead is not None:
            ahead.fetch(builder, step)
        for i in range(tiles):
            own = left.at(builder, _SIZE(_TILE * i), builder.mul(step, _SIZE(2 * STEP)))
            _load_tile(builder, _BYTE(4 + i), own)
        for j in range(across):
            pairs = _BYTE(4 + tiles + j % (4 - tiles))
            _load_tile(builder, pairs, right.at(builder, builder.mul(step, _SIZE(STEP // 2)), 64 * j))
            for i in range(tiles):
                _call(builder, f"llvm.x86.{instruction}", sums[i, j][0], _BYTE(4 + i), pairs)
    for tile, place in sums.values():
        _call(builder, "llvm.x86.tilestored64", tile, place.pointer(builder, _BYTE), place.stride)


def _load_tile(builder: Any, tile: Any, rows: Rows) -> None:
    _call(builder, "llvm.x86.tileloadd64", tile, rows.pointer(builder, _BYTE), rows.stride)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def add_vectors(
    builder: Any,
    rows: int,
    vectors: int,
    steps: Any,
    left: Rows,
    right: Rows,
    out: Rows,
    *,
    reads_memory: bool = False,
    ahead: Ahead | None = None,
    is_new: bool = False,
    in_pairs: bool = True,
) -> None:
    """Emits the code for `rows` times `vectors` of 16 sums, over `steps` times STEP rows, `in_pairs` or not."""
    places = [
        [out.at(builder, _SIZE(i), 64 * v).pointer(builder, _FLOATS) for v in range(vectors)] for i in range(rows)
    ]
    starts = [
        [ir.Constant(_FLOATS, [0.0] * _LANES) if is_new else builder.load(place, align=4) for place in row]
        for row in places
    ]
    totals = [[cgutils.alloca_once_value(builder, start) for start in row] for row in starts]
    with cgutils.for_range_slice(builder, _SIZE(0), steps, _SIZE(1), _SIZE) as (step, _):
        if ahead is not None:
            ahead.fetch(builder, step)
        for k in range(STEP // 2):
            pair = builder.add(builder.mul(step, _SIZE(STEP // 2)), _SIZE(k))
            if in_pairs:
                own = [right.at(builder, pair, 64 * v) for v in range(vectors)]
                for line in own if reads_memory else ():
                    fetch_soon(builder, line.address)
                panel = [builder.load(line.pointer(builder, _INTS), align=4) for line in own]
            else:
                both = right.at(builder, builder.mul(pair, _SIZE(2)))
                panel = [_pair(builder, both, _LANES * v) for v in range(vectors)]
            for i, row in enumerate(totals):
                place = left.at(builder, _SIZE(i), builder.mul(pair, _SIZE(4)))
                weight = splat(builder, builder.load(place.pointer(builder, _WORD), align=2), _LANES)
                for vector, total in zip(panel, row, strict=True):
                    builder.store(_add_pairs(builder, builder.load(total), vector, weight), total)
    for row, own_totals in zip(places, totals, strict=True):
        for place, total in zip(row, own_totals, strict=True):
            builder.store(builder.load(total), place, align=4)


def _add_pairs(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """Adds, in each lane, two products of bfloat16 numbers."""
    if HAS_BF16:
        pairs = ir.VectorType(_BFloat(), 2 * _LANES)
        kind = ir.FunctionType(total.type, [total.type, pairs, pairs])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(function, [total, builder.bitcast(weights, pairs), builder.bitcast(inputs, pairs)])
    sixteen, upper = (ir.Constant(_INTS, [number] * _LANES) for number in (16, 0xFFFF0000))
    low, high = ((builder.shl(part, sixteen), builder.and_(part, upper)) for part in (weights, inputs))
    for own, other in zip(low, high, strict=True):
        product = builder.fmul(builder.bitcast(own, _FLOATS), builder.bitcast(other, _FLOATS), flags=("contract",))
        total = builder.fadd(total, product, flags=("contract",))
    return total
