"""The quantised blocks of GGUF files as numbers with scales and minimums. Pure.

Source of the layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c. Rows of bytes
[n, blocks, size] become numbers and scales as cpu/grouped.py has them: nothing is rounded, because a product of two
stored scales has at most 24 bits.
"""

from collections.abc import Callable, Mapping

import numpy as np

from headrace_predictor.engine.cpu.grouped import Numbers
from headrace_predictor.engine.state.cache import Array

# By type, the index of its kind in KINDS of cpu/grouped.py.
KINDS_OF = {"Q4_0": 0, "Q4_1": 0, "Q4_K": 0, "Q5_0": 1, "Q8_0": 1, "Q5_1": 2, "Q5_K": 2, "Q6_K": 3}


def unpack(kind: str, rows: Array) -> Numbers:
    """The numbers of uint8 rows [n, bytes] of a type such as Q4_K."""
    unpack_one, size = _UNPACK[kind]
    return unpack_one(rows.reshape(len(rows), -1, size))


def _half(blocks: Array, first: int) -> Array:
    """The float16 at a place of each block, as float32 [n, blocks]."""
    return np.ascontiguousarray(blocks[:, :, first : first + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _numbers(numbers: Array, scales: Array, minimums: Array | None = None) -> Numbers:
    rows = len(numbers)
    own = np.empty((rows, 0), np.float32) if minimums is None else minimums.reshape(rows, -1)
    return Numbers(numbers.reshape(rows, -1).astype(np.int8), scales.reshape(rows, -1), own)


def _nibbles(bytes_: Array) -> Array:
    """The low halves of the bytes [..., n], then the high ones."""
    return np.concatenate((bytes_ & 15, bytes_ >> 4), axis=-1)


def _fifth_bits(blocks: Array) -> Array:
    """The fifth bits of a block's 32 numbers, times 16."""
    bits = np.unpackbits(np.ascontiguousarray(blocks), axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Array) -> Numbers:
    scales = _half(blocks, 0)
    return _numbers(_nibbles(blocks[:, :, 2:]), scales, scales * 8)


def _q4_1(blocks: Array) -> Numbers:
    return _numbers(_nibbles(blocks[:, :, 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Array) -> Numbers:
    numbers = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return _numbers(numbers.astype(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Array) -> Numbers:
    numbers = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return _numbers(numbers, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Array) -> Numbers:
    return _numbers(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8), _half(blocks, 0))


def _scales_of(blocks: Array) -> tuple[Array, Array]:
    """Scales and minimums of the eight groups of a block, from 6 bits each and the block's two numbers."""
    low, middle, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1).astype(np.float32)
    minimums = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1).astype(np.float32)
    return scales * _half(blocks, 0)[:, :, None], minimums * _half(blocks, 2)[:, :, None]


def _q4_k(blocks: Array) -> Numbers:
    parts = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)
    return _numbers(_nibbles(parts), *_scales_of(blocks))


def _q5_k(blocks: Array) -> Numbers:
    parts = blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)
    bits = blocks[:, :, 16:48][:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    numbers = _nibbles(parts).reshape(*blocks.shape[:2], 8, 32) | bits << 4
    return _numbers(numbers, *_scales_of(blocks))


def _q6_k(blocks: Array) -> Numbers:
    low = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = _nibbles(low).reshape(*blocks.shape[:2], 2, 4, 32) | high << 4
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    return _numbers(numbers.astype(np.int8) - np.int8(32), scales * _half(blocks, 208)[:, :, None])


_UNPACK: Mapping[str, tuple[Callable[[Array], Numbers], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
