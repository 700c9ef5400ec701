"""Root mean square norm, compiled for the CPU by Numba: torch takes eight passes for it.

Rows are computed separately and always in the same order. Sums are float32, as in transformers' `LlamaRMSNorm`, which
also rounds before the multiplication by the weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from services.predictor.engine.cpu.vectors import narrow, widen

_ONE = np.float32(1)


# Lanes may reorder the sum: the order then depends only on the row's length.
@njit(nogil=True, error_model="numpy", cache=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
def rms_norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Rows of x [rows, n], float32 or bfloat16's bits as uint16, times weight [n], to out [rows, n]."""
    rows, size = x.shape
    for i in range(rows):
        squares = np.float32(0)
        for d in range(size):
            squares += widen(x[i, d]) * widen(x[i, d])
        inverse = _ONE / np.sqrt(squares / np.float32(size) + epsilon)
        for d in range(size):
            out[i, d] = narrow(widen(x[i, d]) * inverse * widen(weight[d]), x[i, d])
