"""Inverse frequencies, cosines and sines of the rotary position embedding, the same bits on every machine.

Only decimal arithmetic and additions and multiplications of NumPy, each rounded by itself: no libm. Cosines and sines
are within one unit in the last place of float32 for angles from 0 to 2^20. The polynomials are fdlibm's, of
`__kernel_sin` and `__kernel_cos`; pi / 2 has three parts of so few bits that products with quarter turns are exact.
"""

from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS = 128  # At once: intermediate results stay in the cache.
_QUARTERS_PER_RADIAN = 6.36619772367581382433e-01
_QUARTER_TURN = 1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21
_SINE = (
    *(1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06),
    *(-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01),
)
_COSINE = (
    *(-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07),
    *(2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02),
)


def inverse_frequencies(theta: float, size: int) -> NDArray[np.float32]:
    """theta^(-2i / size) for i below size / 2, computed to 40 digits."""
    context, base = Context(prec=40), Decimal(theta)
    exponents = (context.divide(Decimal(-2 * i), Decimal(size)) for i in range(size // 2))
    return np.array([float(context.power(base, exponent)) for exponent in exponents], np.float32)


def scaled(frequencies: NDArray[np.float32], parameters: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Inverse frequencies for a configuration's `rope_parameters`; None for kinds with other formulas.

    Sources: transformers' modeling_rope_utils, `_compute_linear_scaling_rope_parameters` and
    `_compute_llama3_parameters`.
    """
    kind, factor = parameters["rope_type"], np.float32(parameters.get("factor") or 1)
    if kind in ("default", "linear"):
        return frequencies / factor
    if kind != "llama3":
        return None
    low, high = (np.float32(parameters[f"{end}_freq_factor"]) for end in ("low", "high"))
    length = np.float32(parameters["original_max_position_embeddings"])
    waves = np.float32(2 * np.pi) / frequencies
    share = (length / waves - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    return np.where(waves > length / low, frequencies / factor, np.where(waves < length / high, frequencies, between))


def cosines_and_sines(
    positions: NDArray[Any], frequencies: NDArray[np.float32], scaling: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Those of positions [T] times inverse frequencies [n], a product of float32, times a scaling; [T, n] each."""
    cosines, sines = (np.empty((len(positions), len(frequencies)), np.float32) for _ in range(2))
    for rows in (slice(first, first + _ROWS) for first in range(0, len(positions), _ROWS)):
        angles = (positions[rows, None].astype(np.float32) * frequencies).astype(np.float64)
        quarters = np.rint(angles * _QUARTERS_PER_RADIAN)
        for part in _QUARTER_TURN:
            angles -= quarters * part
        square = angles * angles
        sine = angles + angles * square * _polynomial(square, _SINE)
        cosine = 1.0 - (0.5 * square - square * square * _polynomial(square, _COSINE))
        odd = quarters % 2 == 1
        cosines[rows] = np.where(odd, sine, cosine) * np.where(quarters % 4 % 3 == 0, 1.0, -1.0)
        sines[rows] = np.where(odd, cosine, sine) * np.where(quarters % 4 < 2, 1.0, -1.0)
    return cosines * np.float32(scaling), sines * np.float32(scaling)


def _polynomial(x: NDArray[np.float64], coefficients: tuple[float, ...]) -> NDArray[np.float64]:
    total = np.zeros_like(x)
    for coefficient in coefficients:
        total = total * x + coefficient
    return total
