"""Root mean square norm, compiled for the CPU by Numba: torch takes eight passes for it.

Rows are computed separately and always in the same order. Sums are float32, as in transformers' `LlamaRMSNorm`, which
also rounds before the multiplication by the weight.
"""

from typing import Any

import numpy as np
from numba import njit

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.vectors import array_at, narrow, widen

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
def rms_norm(address: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """The norm of x [rows, n] at `address`, with weight [n], to out [rows, n]."""
    x = array_at(address, out.shape, out)
    for i in range(len(x)):
        _norm_row(x[i], weight, epsilon, out[i])
