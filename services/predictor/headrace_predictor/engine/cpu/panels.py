"""Products of a few float32 rows with a weight that oneDNN has packed: panels [inputs, PANEL] of 64 output channels.

oneDNN takes 25 µs to find the code for a product, in which a processor reads 200 KB of weights. Here a sum adds its
products in the order of the inputs, in sections that begin at zero, and each product is rounded once with its sum: as
oneDNN does, so that rows have the same bits in either. packed_linear.py finds the sections, and verifies it for each
layer.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.pairs import FEATURES
from headrace_predictor.engine.cpu.vectors import splat

PANEL = 64
_LANES, _VECTORS = 16, 4
MOST_ROWS = 6 if "avx512f" in FEATURES else 1  # Whose sums fit into the registers.

_SIZE, _FLOAT = ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, _LANES)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply(typing_context: Any, rows: Any, inputs: Any, sizes: Any, panel: Any, added: Any, out: Any) -> Any:
    """Writes PANEL columns of `out` for `count` columns of `inputs` [rows, all]: float32, by their addresses.

    `sizes`: the count, and the lengths of rows of `inputs` and `out`. `added`: whether to add what is in `out`, and the
    address of the columns' bias, or 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        for n in range(1, MOST_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", rows, _SIZE(n))):
                _emit(builder, n, *rest)
        return context.get_dummy_value()

    three, two = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2)
    return types.void(types.int64, types.int64, three, types.int64, two, types.int64), generate


def _emit(builder: Any, rows: int, inputs: Any, sizes: Any, panel: Any, added: Any, out: Any) -> None:
    count, length, width = cgutils.unpack_tuple(builder, sizes)
    continues, bias = cgutils.unpack_tuple(builder, added)
    fma = builder.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(_FLOATS, [_FLOATS] * 3))
    totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
    for total in (total for own in totals for total in own):
        builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), total)

    def at(address: Any, number: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(address, builder.mul(number, _SIZE(4))), kind.as_pointer())

    def vectors(address: Any) -> list[Any]:
        return [builder.load(at(address, _SIZE(_LANES * v), _FLOATS), align=4) for v in range(_VECTORS)]

    with cgutils.for_range_slice(builder, _SIZE(0), count, _SIZE(1), _SIZE) as (k, _):
        weights = vectors(builder.add(panel, builder.mul(k, _SIZE(4 * PANEL))))
        for row, own in enumerate(totals):
            place = builder.add(builder.mul(length, _SIZE(row)), k)
            number = splat(builder, builder.load(at(inputs, place, _FLOAT), align=4), _LANES)
            for weight, total in zip(weights, own, strict=True):
                builder.store(builder.call(fma, (number, weight, builder.load(total))), total)
    outs = [builder.add(out, builder.mul(width, _SIZE(4 * row))) for row in range(rows)]
    for condition, others in ((continues, outs), (bias, [bias] * rows)):
        with builder.if_then(builder.icmp_signed("!=", condition, _SIZE(0))):
            for own, address in zip(totals, others, strict=True):
                for total, other in zip(own, vectors(address), strict=True):
                    builder.store(builder.fadd(builder.load(total), other), total)
    for own, address in zip(totals, outs, strict=True):
        for v, total in enumerate(own):
            builder.store(builder.load(total), at(address, _SIZE(_LANES * v), _FLOATS), align=4)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _compute(
    rows: Any, inputs: Any, count: Any, weight: Any, size: Any, section: Any, bias: Any, out: Any, width: Any
) -> None:
    for panel in range(width // PANEL):
        first = panel * PANEL * 4
        for k in range(0, count, section):
            some = min(section, count - k)
            added = (k, bias + first if bias and k + some == count else 0)
            sizes, place = (some, count, width), weight + panel * size + k * PANEL * 4
            _multiply(rows, inputs + k * 4, sizes, place, added, out + first)


class PanelProduct:
    """x [..., inputs] of up to MOST_ROWS rows to x·weightᵀ + bias [..., outputs].

    The weight of `size` bytes is at an address that stays; a sum has sections of so many inputs.
    """

    def __init__(self, shape: torch.Size, address: int, size: int, bias: Tensor | None, section: int) -> None:
        self._outputs, self._inputs = shape
        panels = -(-self._outputs // PANEL)
        if size < panels * self._inputs * PANEL * 4:
            raise ValueError("oneDNN has packed the weight in another form")
        self._width = panels * PANEL
        self._bias = torch.zeros(self._width if bias is not None else 0)
        self._bias[: self._outputs] = 0 if bias is None else bias
        self._weight = self._inputs, address, size // panels, section, 0 if bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], self._width)
        inputs, *weight = self._weight
        _compute(x.numel() // inputs, x.data_ptr(), inputs, *weight, out.data_ptr(), self._width)
        return out if self._width == self._outputs else out[..., : self._outputs].contiguous()
