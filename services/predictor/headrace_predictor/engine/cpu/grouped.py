"""Grouped weights: integers whose groups of 32, or halves of these, have float32 scales and minimums of their own.

A weight is scale * number - minimum. So are the formats of GGUF files, which are packed here without loss. A panel has
one of the KINDS and lies in memory as [group, group_bytes]: the scales [scales, PANEL] and minimums
[PANEL], float32; then the numbers, of 8 bits [GROUP / 4, PANEL, 4] plus 128, of 4 bits [GROUP / 8, PANEL, 4], where
byte j has those of inputs 8 t + j and 8 t + 4 + j in its low and high half.

The sizes of panels, blocks and groups are those of all streamed weights: see products.py and formats.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.state.cache import Array

PANEL = 64  # Output channels that are computed together.
BLOCK = 128  # Inputs of one step; those that share a scale in the integer formats.
GROUP = 32  # Inputs that share a scale of 4-bit weights.
INT4_BYTES = PANEL * (4 + BLOCK // 2)  # Of a panel: a block of int4, its scales and weights.
INT4_SCALE = 0xFFF00000  # Of the word of a scale and factors.
ROWS = 4  # Rows that read the weights together.
_GROUPS = BLOCK // GROUP
HALF = GROUP // 2  # Inputs whose sum is kept for grouped weights.


class Kind(NamedTuple):
    """Of grouped weights: `bits` of a weight, float32 `scales` of a group, and whether a minimum is subtracted."""

    bits: int
    scales: int
    has_minimum: bool

    @property
    def group_bytes(self) -> int:
        return PANEL * (4 * self.scales + 4 * self.has_minimum + GROUP * self.bits // 8)


KINDS = (Kind(4, 1, True), Kind(8, 1, False), Kind(8, 1, True), Kind(8, 2, False))


class Numbers(NamedTuple):
    """Some rows: int8 [n, inputs], float32 scales [n, inputs / 32 or 16] and minimums [n, inputs / 32 or 0]."""

    numbers: Array
    scales: Array
    minimums: Array

    def values(self) -> Array:
        """float32 [n, inputs]."""
        rows, inputs = self.numbers.shape
        parts = self.numbers.reshape(rows, self.scales.shape[1], -1) * self.scales[:, :, None]
        if self.minimums.shape[1]:
            parts = parts.reshape(rows, self.minimums.shape[1], -1) - self.minimums[:, :, None]
        return parts.reshape(rows, inputs)


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix [outputs, inputs]; `rows` gives those from a first one to an end; `kind` is an index of KINDS."""

    kind: int
    outputs: int
    inputs: int
    rows: Callable[[int, int], Numbers]


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix [outputs, inputs]; `scales` float32 [padded outputs], empty where there are none of outputs."""

    outputs: int
    inputs: int
    weights: Array  # uint8, aligned.
    scales: Array

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)

    @property
    def blocks(self) -> int:
        return -(-self.inputs // BLOCK)

    @property
    def nbytes(self) -> int:
        return int(self.weights.nbytes + self.scales.nbytes)

    @property
    def address(self) -> int:
        """Of what a product reads."""
        return int(self.weights.ctypes.data)

    def numbers(self, bias: Tensor | None) -> list[int]:
        """The numbers of a product with the matrix, see decode.py, which reads them while this and the bias live."""
        scales = self.scales.ctypes.data if len(self.scales) else 0
        size = self.weights.nbytes // self.panels
        own_bias = 0 if bias is None else bias.data_ptr()
        return [self.address, scales, own_bias, self.panels, self.blocks, size, self.outputs, self.inputs]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [n, inputs] of the matrix as float32, for ids [n]."""
        out = np.empty((len(ids), self.blocks * BLOCK), np.float32)
        self.read_rows(ids, out)
        return torch.from_numpy(out)[:, : self.inputs].contiguous()

    def read_rows(self, ids: Tensor, out: Array) -> None:
        """Writes rows of whole blocks [n, padded inputs]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Grouped(PackedMatrix):
    """One of grouped weights, whose panels have scales of their own; `table` int64 [panels, 3], see decode.py."""

    table: Array

    @property
    def address(self) -> int:
        return int(self.table.ctypes.data)

    def read_rows(self, ids: Tensor, out: Array) -> None:
        first = self.weights.ctypes.data
        for i, row in enumerate(ids.tolist()):
            address, kind, size = self.table[row // PANEL].tolist()
            panel = self.weights[address - first : address - first + size * self.blocks]
            out[i] = _unpacked(kind, panel, row % PANEL).values()


def padded_bytes(kind: int, outputs: int, inputs: int) -> int:
    return -(-outputs // PANEL) * -(-inputs // BLOCK) * _GROUPS * KINDS[kind].group_bytes


def pack_grouped(matrices: Sequence[GroupedMatrix], file: PackedFile, interleave: bool = False) -> Grouped:
    """Packs matrices one below the other, each of whole panels but the last; or panel by panel in turn."""
    inputs = matrices[0].inputs
    order = [(m, row) for m, matrix in enumerate(matrices) for row in range(0, matrix.outputs, PANEL)]
    if interleave:
        order.sort(key=lambda place: place[::-1])
    groups = -(-inputs // BLOCK) * _GROUPS
    sizes = [groups * KINDS[matrices[m].kind].group_bytes for m, _ in order]
    memory = file.take(sum(sizes))
    table = np.zeros((len(order), 3), np.int64)
    at = 0
    for entry, (m, row), size in zip(table, order, sizes, strict=True):
        kind, end = matrices[m].kind, min(row + PANEL, matrices[m].outputs)
        entry[:] = memory.ctypes.data + at, kind, size // groups * _GROUPS
        if not file.is_packed:
            _pack(kind, matrices[m].rows(row, end), memory[at : at + size].reshape(groups, -1))
        at += size
    outputs = len(order) * PANEL if interleave else sum(matrix.outputs for matrix in matrices)
    return Grouped(outputs, inputs, memory, np.empty(0, np.float32), table)


def _pack(kind: int, rows: Numbers, memory: Array) -> None:
    """Packs up to PANEL rows to a panel [groups, group_bytes]."""
    bits, scales, has_minimum = KINDS[kind]
    groups, head = len(memory), 4 * PANEL * (scales + has_minimum)
    numbers = np.zeros((PANEL, groups * GROUP), np.uint8)
    numbers[: len(rows.numbers), : rows.numbers.shape[1]] = rows.numbers.view(np.uint8)
    floats = np.zeros((groups, scales + has_minimum, PANEL), np.float32)
    filled, count = rows.numbers.shape[1] // GROUP, len(rows.numbers)
    floats[:filled, :scales, :count] = rows.scales.reshape(count, filled, scales).transpose(1, 2, 0)
    if has_minimum:
        floats[:filled, scales, :count] = rows.minimums.T
    memory[:, :head] = floats.reshape(groups, -1).view(np.uint8)
    if bits == 8:
        numbers += np.uint8(128)
    else:
        halves = numbers.reshape(PANEL, -1, 2, 4)
        numbers = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    memory[:, head:] = numbers.reshape(PANEL, -1, 4).transpose(1, 0, 2).reshape(groups, -1)


def _unpacked(kind: int, panel: Array, row: int) -> Numbers:
    """A row of a panel's bytes."""
    bits, scales, has_minimum = KINDS[kind]
    groups = panel.reshape(-1, KINDS[kind].group_bytes)
    head = 4 * PANEL * (scales + has_minimum)
    floats = np.ascontiguousarray(groups[:, :head]).view(np.float32).reshape(len(groups), -1, PANEL)[:, :, row]
    numbers = groups[:, head:].reshape(len(groups), -1, PANEL, 4)[:, :, row]
    if bits == 8:
        numbers = (numbers - np.uint8(128)).view(np.int8)
    else:
        numbers = np.stack((numbers & np.uint8(15), numbers >> np.uint8(4)), axis=2).view(np.int8)
    minimums = floats[:, scales:].reshape(1, -1)
    return Numbers(numbers.reshape(1, -1), floats[:, :scales].reshape(1, -1), minimums)


def quantised(weight: Tensor) -> GroupedMatrix:
    """A matrix [outputs, inputs] by the rule of GGUF's Q8_0: of 32 numbers the largest is 127 times the scale, which is
    rounded to 16 bits after the numbers are."""

    def rows(first: int, end: int) -> Numbers:
        values = np.zeros((end - first, -(-weight.shape[1] // GROUP) * GROUP), np.float32)
        values[:, : weight.shape[1]] = weight[first:end].float().numpy()
        groups = values.reshape(end - first, -1, GROUP)
        scales = np.abs(groups).max(axis=2) / np.float32(127)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        exact = groups * inverse[:, :, None]
        # Halves away from zero.
        numbers = np.trunc(exact + np.copysign(np.float32(0.5), exact)).astype(np.int8)
        stored = scales.astype(np.float16).astype(np.float32)
        return Numbers(numbers.reshape(end - first, -1), stored, np.empty((end - first, 0), np.float32))

    return GroupedMatrix(1, weight.shape[0], weight.shape[1], rows)
