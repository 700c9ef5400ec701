"""Root mean square norm, compiled for the CPU by Numba: torch takes eight passes for it.

Rows are computed separately and always in the same order. Sums are float32, as in transformers' `LlamaRMSNorm`, which
also rounds before the multiplication by the weight.
"""

from typing import Any

import numpy as np
from numba import njit

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.vectors import array_at, narrow, swish_times, widen

_ONE = np.float32(1)
# Lanes may reorder the sum: the order then depends only on the row's length.
_OPTIONS = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _norm_row(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """The norm of x [n], with weight [n], to out [n], which may be x; float32, or bfloat16's bits as uint16."""
    squares = np.float32(0)
    for d in range(len(x)):
        squares += widen(x[d]) * widen(x[d])
    inverse = _ONE / np.sqrt(squares / np.float32(len(x)) + epsilon)
    for d in range(len(x)):
        out[d] = narrow(widen(x[d]) * inverse * widen(weight[d]), x[d])


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def rms_norm(address: Any, gates: Any, weight: Any, epsilon: Any, groups: Any, gates_first: Any, out: Any) -> None:
    """The norm of each of so many groups of x [rows, n] at `address`, with weight [n], to out [rows, n].

    It is multiplied by SiLU of the gates [rows, n] at an address, or x is; 0 for none. A group has a multiple of 16.
    """
    x, size = array_at(address, out.shape, out), out.shape[1] // groups
    row, gate = np.empty(size, np.float32), np.empty(size, np.float32)
    for i in range(len(x)):
        for first in range(0, out.shape[1], size):
            part = slice(first, first + size)
            if not gates:
                _norm_row(x[i, part], weight[part], epsilon, out[i, part])
                continue
            own = array_at(gates, out.shape, out)[i, part]
            for d in range(size):
                row[d], gate[d] = widen(x[i, first + d]), widen(own[d])
            if gates_first:
                swish_times(gate, row, row)
            _norm_row(row, weight[part], epsilon, row)
            if not gates_first:
                swish_times(gate, row, row)
            for d in range(size):
                out[i, first + d] = narrow(row[d], out[i, first + d])
