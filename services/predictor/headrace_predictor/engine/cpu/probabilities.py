"""Probabilities of a vocabulary and their sums, compiled for the CPU by Numba: torch takes ten passes for them.

Rows are computed separately, and always in the same order on any machine. Rows [n, size] lie `stride` numbers apart.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.vectors import array_at, exponentiate

_F = np.empty(0, np.float32)
_LOWEST, _ONE = np.float32(-3e38), np.float32(1)
_LANES = 8


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def softmax(scores: Any, stride: Any, size: Any, highest: Any, divisors: Any, out: Any) -> None:
    """e^((score - highest) / divisor), divided by their sum, of float32 scores at an address.

    `highest` and `divisors` [n]; out [n, a multiple of 16]: what is behind the size is zero.
    """
    for i in prange(len(out)):
        row, powers = array_at(scores + i * stride * 4, (size,), _F), out[i]
        for k in range(size):
            powers[k] = (row[k] - highest[i]) / divisors[i]
        powers[size:] = _LOWEST
        inverse = _ONE / exponentiate(powers)
        for k in range(size):
            powers[k] *= inverse


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def sum_blocks(weights: Any, stride: Any, size: Any, length: Any, out: Any) -> None:
    """The sums of blocks of so many float32 weights at an address, to float64 out [n, size // length + 1]."""
    for i in prange(len(out)):
        row, lanes = array_at(weights + i * stride * 4, (size,), _F), np.empty(_LANES)
        for block in range(out.shape[1]):
            part = row[block * length : (block + 1) * length]
            whole = len(part) // _LANES * _LANES
            lanes[:] = 0
            for first in range(0, whole, _LANES):
                for lane in range(_LANES):
                    lanes[lane] += part[first + lane]
            for k in range(whole, len(part)):
                lanes[k - whole] += part[k]
            total = 0.0
            for lane in range(_LANES):
                total += lanes[lane]
            out[i, block] = total
