"""What the kernels of kernels.py take; tests/support/plain_kernels.py has each in plain torch.

Keys are [blocks, heads, head size, page] and values [blocks, heads, page, value size] of one layer of the cache, whose
blocks are equally far apart, and whose strides beyond the first are those of a contiguous tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from headrace_predictor.engine.state.attention import Range, Scores

INT8_BLOCK = 128  # Inputs that share a scale, as on the CPU.


class Matrix(NamedTuple):
    """Weights [outputs, inputs], biases [outputs], and of int8 weights the scales, float32 [outputs]."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None


HeadNorm = tuple[Tensor, float]  # Of each query and each key head: weights [2, head size], and epsilon.
Attend = Callable[[Tensor, Tensor, Tensor, Range, Scores], Tensor]


class Operations(NamedTuple):
    """The functions of kernels.py."""

    attend: Attend
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    turn_and_store: Callable[[Tensor, tuple[Tensor, Tensor], HeadNorm | None, Tensor, Tensor, Range], Tensor]
    gate: Callable[[Tensor], Tensor]
