"""The formats of streamed weights: how a matrix is divided, quantised and laid out for products.py.

Weights [outputs, inputs] are padded with zeros to panels of PANEL outputs and blocks of BLOCK inputs. A panel is one
range of memory, which is read from its begin to its end:

- bf16, uint16 [panel, input / 2, PANEL, 2];
- int8, uint8 [panel, input / 4, PANEL, 4], a weight plus 128; one scale for each output;
- int4, int8 [panel, group, GROUP_BYTES]: the group's scales [PANEL], bfloat16; then [input / 8, PANEL, 4], where byte j
  has the weights plus 8 of inputs 8 t + j and 8 t + 4 + j, in its low and high half.

Inputs become bfloat16, or 8 bits with one scale for each row and block. Rounding is to the nearest, then even.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, GROUP_BYTES, PANEL, PackedMatrix
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.vectors import narrow, widen
from headrace_predictor.engine.state.cache import Array, array_of

MARKERS: dict[str, Array] = {
    "bf16": np.empty(0, np.uint16),
    "int8": np.empty(0, np.uint8),
    "int4": np.empty(0, np.int8),
    "grouped": np.empty(0, np.int32),
}
_BYTES_OF_BLOCK: dict[str, int] = {"bf16": 2 * BLOCK, "int8": BLOCK, "int4": GROUP_BYTES // PANEL * BLOCK // GROUP}
_SHIFT = np.float32(12582912)  # 1.5 * 2^23: the low bits of a sum with it are the nearest integer.
_LEAST = np.float32(2.0**-120)  # Of inputs: 127 divided by less may be infinite.


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
    rows = [array_of(matrix) for matrix in matrices]
    marker = MARKERS[format_]
    part = np.zeros((PANEL, -(-inputs // BLOCK) * BLOCK), rows[0].dtype)
    at = [(m, row) for m, matrix in enumerate(rows) for row in range(0, len(matrix), PANEL)] if interleave else []
    at.sort(key=lambda place: (place[1], place[0]))
    whole = None if interleave else (rows[0] if len(rows) == 1 else np.concatenate(rows))
    for panel in range(panels):
        part[:] = 0
        m, row = at[panel] if interleave else (0, panel * PANEL)
        some = (rows[m] if whole is None else whole)[row : row + PANEL]
        part[: len(some), :inputs] = some
        _pack_panel(marker, part, memory[panel], scales[panel * PANEL : (panel + 1) * PANEL])
    return packed


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_panel(marker: Any, part: Any, memory: Any, scales: Any) -> None:
    """Packs weights [PANEL, inputs] of whole blocks to a panel's bytes."""
    row = np.empty(part.shape[1], np.float32)
    for n in range(PANEL):
        for k in range(len(row)):
            row[k] = widen(part[n, k])
        if is_bf16(marker):
            _pack_bf16(row, n, memory.view(np.uint16))
        elif len(scales):
            scales[n] = _pack_int8(row, n, memory)
        else:
            _pack_int4(row, n, memory)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_bf16(row: Any, n: Any, words: Any) -> None:
    for k in range(len(row)):
        words[(k // 2 * PANEL + n) * 2 + k % 2] = narrow(row[k], words[0])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_int8(row: Any, n: Any, memory: Any) -> Any:
    largest = np.float32(0)
    for k in range(len(row)):
        if not is_finite(row[k]):
            largest = np.float32(np.nan)
        elif abs(row[k]) > largest:
            largest = abs(row[k])
    scale = largest / np.float32(127)
    for k in range(len(row)):
        number = int(round_even(row[k] / scale)) if scale > 0 else 0
        memory[(k // 4 * PANEL + n) * 4 + k % 4] = min(max(number, -127), 127) + 128
    return scale


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_int4(row: Any, n: Any, memory: Any) -> None:
    for group in range(len(row) // GROUP):
        numbers = row[group * GROUP : (group + 1) * GROUP]
        own = memory[group * GROUP_BYTES : (group + 1) * GROUP_BYTES]
        scale = _scale_of(numbers)
        words = own[: 2 * PANEL].view(np.uint16)
        words[n] = narrow(scale, words[0])
        for t in range(GROUP // 8):
            for j in range(4):
                low, high = _nibble(numbers[8 * t + j], scale), _nibble(numbers[8 * t + 4 + j], scale)
                own[2 * PANEL + (t * PANEL + n) * 4 + j] = low + 8 + 16 * (high + 8)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _scale_of(numbers: Any) -> Any:
    """The number of the largest size is -8 times the scale."""
    extreme = np.float32(0)
    for k in range(len(numbers)):
        if not is_finite(numbers[k]):
            return np.float32(np.nan)
        if abs(numbers[k]) > abs(extreme):
            extreme = numbers[k]
    return widen(narrow(extreme / np.float32(-8), np.uint16(0)))


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _nibble(number: Any, scale: Any) -> Any:
    return min(max(int(round_even(number / scale)), -8), 7) if abs(scale) > 0 else 0


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
            if is_bf16(marker):
                out[i, k] = widen(panel.view(np.uint16)[(k // 2 * PANEL + n) * 2 + k % 2])
            elif len(scales):
                whole = np.float32(np.int32(panel[(k // 4 * PANEL + n) * 4 + k % 4]) - 128)
                out[i, k] = whole * scales[ids[i]]
            else:
                own = panel[k // GROUP * GROUP_BYTES : (k // GROUP + 1) * GROUP_BYTES]
                byte = np.int32(own[2 * PANEL + (k % GROUP // 8 * PANEL + n) * 4 + k % 4])
                whole = np.float32((byte >> 4 if k % 8 >= 4 else byte & 15) - 8)
                out[i, k] = whole * widen(own[: 2 * PANEL].view(np.uint16)[n])


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def is_bf16(marker: Any) -> Any:
    """Whether an empty array has the type of bfloat16 weights."""
    return marker.itemsize == 2


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def is_grouped(marker: Any) -> Any:
    """Whether an empty array has the type of grouped weights."""
    return marker.itemsize == 4


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def convert_row(marker: Any, numbers: Any, row: Any, scales: Any, sums: Any) -> None:
    """Converts a row of inputs, float32 [n], to the format's `row` of whole blocks, uint16 or int8.

    Of an integer format: `scales` float32 [blocks], and `sums` int32 of the converted numbers, times what was added to
    the weights and negative: by block for int8, by group for int4; of grouped weights by half a group, as they are.
    """
    count = len(numbers)
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
