"""The formats of streamed weights: how a matrix is divided, quantised and laid out for products.py.

Weights [outputs, inputs] are padded with zeros to panels of PANEL outputs and blocks of BLOCK inputs. A panel is one
range of memory, which is read from its begin to its end:

- fp32, float32 [panel, input, PANEL];
- bf16, uint16 [panel, input / 2, PANEL, 2];
- int8, uint8 [panel, input / 4, PANEL, 4], a weight plus 128; one scale for each output;
- int4, int8 [panel, block, INT4_BYTES]: uint32 [PANEL], the block's scale in the upper 12 bits of a float32 and below
  them the factors of its four groups, of 5 bits with a sign, the first group's lowest; then [input / 8, PANEL, 4],
  where byte j has the weights plus 8 of inputs 8 t + j and 8 t + 4 + j, in its low and high half. A weight times the
  factor of its group is an integer of 8 bits.

Inputs stay float32, or become bfloat16, or 8 bits with one scale for each row and block. Rounding is to the nearest,
then even.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, INT4_BYTES, INT4_SCALE, PANEL, PackedMatrix
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.vectors import narrow, widen
from headrace_predictor.engine.state.cache import Array, array_of

MARKERS: dict[str, Array] = {
    "fp32": np.empty(0, np.float32),
    "bf16": np.empty(0, np.uint16),
    "int8": np.empty(0, np.uint8),
    "int4": np.empty(0, np.int8),
    "grouped": np.empty(0, np.int32),
}
_BYTES_OF_BLOCK: dict[str, int] = {"fp32": 4 * BLOCK, "bf16": 2 * BLOCK, "int8": BLOCK, "int4": INT4_BYTES // PANEL}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SHIFT = np.float32(12582912)  # 1.5 * 2^23: the low bits of a sum with it are the nearest integer.
_MOST_FACTOR = 15
_SCALE = np.uint32(INT4_SCALE)
_NAN = 0x7FC00000
_LEAST = np.float32(2.0**-120)  # Of inputs: 127 divided by less may be infinite.


def _type_test(kind: Any) -> Any:
    """Tells, while code is compiled, whether an array has numbers of a type; for the empty array of a format."""

    def test(typing_context: Any, marker: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(marker.dtype == kind))

        return types.boolean(marker), generate

    return intrinsic(test)


is_fp32, is_bf16, is_int4, is_grouped = map(_type_test, (types.float32, types.uint16, types.int8, types.int32))


@dataclass(frozen=True)
class Packed(PackedMatrix):
    """One in a format; its weights are [panels, bytes of a panel]."""

    format: str

    def read_rows(self, ids: Tensor, out: Array) -> None:
        _read_rows(MARKERS[self.format], self.weights, self.scales, ids.numpy(), out)


def panel_bytes(format_: str, inputs: int) -> int:
    return PANEL * _BYTES_OF_BLOCK[format_] * -(-inputs // BLOCK)


def pack(format_: str, *matrices: Tensor, file: PackedFile, interleave: bool = False) -> Packed:
    """Packs weights [outputs, inputs] one below the other; or panel by panel in turn, padded to panels each.

    `file` has them already, or gets them."""
    inputs, sizes = matrices[0].shape[1], [len(matrix) for matrix in matrices]
    if interleave:
        sizes = [-(-size // PANEL) * PANEL for size in sizes]
    outputs = sum(sizes)
    panels = -(-outputs // PANEL)
    memory = file.take(panels * panel_bytes(format_, inputs)).reshape(panels, -1)
    scales = file.take(4 * panels * PANEL if format_ == "int8" else 0).view(np.float32)
    packed = Packed(outputs, inputs, memory, scales, format_)
    if file.is_packed:
        return packed
    dtype = _DTYPES.get(format_)
    rows = [array_of(matrix if dtype is None else matrix.to(dtype)) for matrix in matrices]
    whole = rows if interleave else [np.concatenate(rows) if len(rows) > 1 else rows[0]]
    turns = zip_longest(*(np.split(matrix, range(PANEL, len(matrix), PANEL)) for matrix in whole))
    part = np.zeros((PANEL, packed.blocks * BLOCK), rows[0].dtype)
    for panel, some in enumerate(some for turn in turns for some in turn if some is not None):
        part[: len(some), :inputs] = some
        part[len(some) :] = 0
        if dtype is None:
            _pack_panel(part, memory[panel], scales[panel * PANEL : (panel + 1) * PANEL])
        else:  # A word is a number, or two of bfloat16.
            memory[panel].view(np.uint32).reshape(-1, PANEL)[:] = part.view(np.uint32).T
    return packed


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_panel(part: Any, memory: Any, scales: Any) -> None:
    """Packs weights [PANEL, inputs] of whole blocks to a panel's bytes, in an integer format."""
    numbers = np.empty(part.shape, np.float32)
    for n in range(PANEL):
        for k in range(part.shape[1]):
            numbers[n, k] = widen(part[n, k])
    if len(scales):
        _pack_int8(numbers, memory, scales)
    else:
        _pack_int4(numbers, memory)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_int8(numbers: Any, memory: Any, scales: Any) -> None:
    for n in range(PANEL):
        row, largest = numbers[n], np.float32(0)
        for k in range(len(row)):
            if not is_finite(row[k]):
                largest = np.float32(np.nan)
            elif abs(row[k]) > largest:
                largest = abs(row[k])
        scales[n] = scale = largest / np.float32(127)
        for k in range(len(row)):
            number = int(round_even(row[k] / scale)) if scale > 0 else 0
            memory[(k // 4 * PANEL + n) * 4 + k % 4] = min(max(number, -127), 127) + 128


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_int4(numbers: Any, memory: Any) -> None:
    columns = np.empty((BLOCK, PANEL), np.float32)
    for block in range(numbers.shape[1] // BLOCK):
        for n in range(PANEL):
            for k in range(BLOCK):
                columns[k, n] = numbers[n, block * BLOCK + k]
        _pack_block(columns, memory[block * INT4_BYTES : (block + 1) * INT4_BYTES])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_block(numbers: Any, memory: Any) -> None:
    """Packs a block [BLOCK, PANEL] to its bytes; the loops over its columns are compiled to vectors.

    The number of the largest size in a group is about -8 times its scale: of three factors that with the least error.
    """
    extremes, unit = np.zeros((BLOCK // GROUP, PANEL), np.float32), np.zeros(PANEL, np.float32)
    is_bad = np.zeros(PANEL, np.int32)
    for k in range(BLOCK):
        own = extremes[k // GROUP]
        for n in range(PANEL):
            own[n] = numbers[k, n] if abs(numbers[k, n]) > abs(own[n]) else own[n]
            is_bad[n] |= not is_finite(numbers[k, n])
    for group in range(BLOCK // GROUP):
        for n in range(PANEL):
            unit[n] = max(unit[n], abs(extremes[group, n]) / np.float32(8 * _MOST_FACTOR))
    bits, words = unit.view(np.uint32), memory[: 4 * PANEL].view(np.uint32)
    for n in range(PANEL):
        bits[n] = (bits[n] + ~_SCALE) & _SCALE
        words[n] = np.uint32(_NAN) if is_bad[n] else bits[n]
        unit[n] = unit[n] if unit[n] > 0 else np.float32(1)
    for group in range(BLOCK // GROUP):
        own = numbers[group * GROUP : (group + 1) * GROUP]
        factors = _factors(own, extremes[group], unit)
        halves = memory[4 * PANEL + group * GROUP // 2 * PANEL :]
        for n in range(PANEL):
            words[n] |= np.uint32((int(factors[n]) & 31) << (5 * group))
        for k in range(GROUP):
            at, shift = (k // 8 * PANEL * 4) + k % 4, np.uint8(4 * (k % 8 // 4))
            for n in range(PANEL):
                half = np.uint8(int(_quotient(own[k, n], factors[n] * unit[n])) + 8) if not is_bad[n] else np.uint8(8)
                halves[at + 4 * n] = half << shift | (halves[at + 4 * n] if shift else np.uint8(0))


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _factors(numbers: Any, extremes: Any, unit: Any) -> Any:
    """The factors, as float32 [PANEL], of a group [GROUP, PANEL] of blocks with these scales."""
    best, factors = np.full(PANEL, np.inf, np.float32), np.ones(PANEL, np.float32)
    factor, error = np.empty(PANEL, np.float32), np.empty(PANEL, np.float32)
    for step in (-1, 0, 1):
        for n in range(PANEL):
            size = round_even(abs(extremes[n]) / np.float32(8) / unit[n]) + np.float32(step)
            size = min(max(size, np.float32(1)), np.float32(_MOST_FACTOR))
            factor[n] = -size if extremes[n] > 0 else size
            error[n] = 0
        for k in range(GROUP):
            for n in range(PANEL):
                scale = factor[n] * unit[n]
                left = _quotient(numbers[k, n], scale) * scale - numbers[k, n]
                error[n] += left * left
        for n in range(PANEL):
            factors[n] = factor[n] if error[n] < best[n] else factors[n]
            best[n] = min(error[n], best[n])
    return factors


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _quotient(number: Any, scale: Any) -> Any:
    return min(max(round_even(number / scale), np.float32(-8)), np.float32(7))


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def is_finite(number: Any) -> Any:
    return number - number == 0


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def round_even(number: Any) -> Any:
    """The nearest integer, of two the even one, of a float32 below 2^22 in size."""
    return (number + _SHIFT) - _SHIFT


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _read_rows(marker: Any, weights: Any, scales: Any, ids: Any, out: Any) -> None:
    for i in range(len(ids)):
        panel, n = weights[ids[i] // PANEL], ids[i] % PANEL
        for k in range(out.shape[1]):
            if is_fp32(marker):
                out[i, k] = panel.view(np.float32)[k * PANEL + n]
            elif is_bf16(marker):
                out[i, k] = widen(panel.view(np.uint16)[(k // 2 * PANEL + n) * 2 + k % 2])
            elif len(scales):
                whole = np.float32(np.int32(panel[(k // 4 * PANEL + n) * 4 + k % 4]) - 128)
                out[i, k] = whole * scales[ids[i]]
            else:
                own = panel[k // BLOCK * INT4_BYTES : (k // BLOCK + 1) * INT4_BYTES]
                byte = np.int32(own[4 * PANEL + (k % BLOCK // 8 * PANEL + n) * 4 + k % 4])
                number = (byte >> 4 if k % 8 >= 4 else byte & 15) - 8
                word = own[: 4 * PANEL].view(np.uint32)[n : n + 1]
                factor = np.int32(np.int32(word[0]) << (27 - 5 * (k % BLOCK // GROUP))) >> 27
                unit = (word & _SCALE).view(np.float32)[0]
                out[i, k] = np.float32(number * factor) * unit


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def convert_row(marker: Any, numbers: Any, row: Any, scales: Any, sums: Any) -> None:
    """Converts a row of inputs, float32 [n], to the format's `row` of whole blocks, its bytes.

    Of an integer format: `scales` float32 [blocks], and `sums` int32 of the converted numbers, times what was added to
    the weights and negative: by block for int8, by group for int4; of grouped weights by half a group, as they are.
    """
    count = len(numbers)
    if is_fp32(marker):
        words = row.view(np.float32)
        for k in range(count):
            words[k] = numbers[k]
        words[count:] = 0
        return
    if is_bf16(marker):
        words = row.view(np.uint16)
        for k in range(count):
            words[k] = narrow(numbers[k], words[0])
        words[count:] = 0
        return
    by = len(row) // len(sums)
    offset = np.int32(-128 if by == BLOCK else -8 if by == GROUP else 1)
    bits, bytes_ = numbers.view(np.uint32), row.view(np.int8)
    shifted = np.empty(BLOCK, np.float32)
    words = shifted.view(np.int32)
    for block in range(len(scales)):  # The loops below are simple enough to be compiled to vectors.
        first, some = block * BLOCK, min(BLOCK, count - block * BLOCK)
        largest = np.uint32(0)
        for k in range(some):
            twice = np.uint32(bits[first + k] << np.uint32(1))  # Without the sign.
            largest = twice if twice > largest else largest
        size = np.array([largest >> np.uint32(1)], np.uint32).view(np.float32)[0]
        if not is_finite(size):
            size = np.float32(np.nan)
        elif size < _LEAST:
            size = np.float32(0)
        inverse = np.float32(127) / size if size > 0 else np.float32(0)
        scales[block] = size / np.float32(127)
        for k in range(some):
            shifted[k] = numbers[first + k] * inverse + _SHIFT
        for k in range(some):
            bytes_[first + k] = np.int8(words[k])
        bytes_[first + some : first + BLOCK] = 0
        for part in range(BLOCK // by):
            total = np.int32(0)
            for k in range(first + part * by, first + (part + 1) * by):
                total = np.int32(total + np.int32(bytes_[k]))
            sums[block * (BLOCK // by) + part] = offset * total
