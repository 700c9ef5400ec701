"""The compiled kernels for tensors: whether they apply, and the calls.

A call takes arrays that are prepared once for a model or once a step: with a few rows, preparing them takes longer than
the computation.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.cpu.recording import launch
from headrace_predictor.engine.cpu.threads import kernel_threads
from headrace_predictor.engine.state.attention import Range, Scores
from headrace_predictor.engine.state.cache import LayerArrays, array_of

try:
    from headrace_predictor.engine.cpu import attention as cpu_attention
    from headrace_predictor.engine.cpu import norm as cpu_norm
except ImportError:  # Numba is optional.
    cpu_attention = None  # type: ignore[assignment]

_UNROLL = 8  # The kernels' head sizes are multiples of this.
Gates = Literal["first", "last"]
_DTYPES = (torch.float32, torch.bfloat16)


def takes(query: Tensor) -> bool:
    """Whether the kernel supports queries, or values, [..., head size] of this device, dtype and size."""
    return takes_heads(query.device, query.dtype, query.shape[-1])


def takes_heads(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernel supports attention with such heads."""
    return cpu_attention is not None and device.type == "cpu" and dtype in _DTYPES and head_size % _UNROLL == 0


class Buffer:
    """Memory that a kernel writes and a product reads: an array of any shape, and a tensor [first dimension, rest]."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        memory = torch.empty(shape, dtype=dtype)
        self.array = array_of(memory)
        self.tensor = memory.flatten(1)


class Attention:
    """Attention with scores of one kind."""

    def __init__(self, query_heads: int, scores: Scores) -> None:
        self._scale, self._cap = np.float32(scores.scale), np.float32(scores.cap)
        self._bias = np.empty((query_heads, 0), dtype=np.float32) if scores.bias is None else scores.bias.numpy()
        self._by_position = scores.by_position
        self._sinks = np.empty(0, dtype=np.float32) if scores.sinks is None else scores.sinks.detach().float().numpy()

    def __call__(self, cache: LayerArrays, tokens: Range, packed: Tensor, output: Buffer) -> Tensor:
        """Writes the output [T, query heads, value size] for packed queries, keys and values: see attention.py.

        `packed` is [T, ...]. The cache has its dtype.
        """
        packed = packed.contiguous()
        cpu_attention.attend(
            *(kernel_threads(), packed.data_ptr(), packed.stride(0)),
            *(*cache, *tokens.arrays, self._scale, self._cap, self._bias, self._by_position),
            *(self._sinks, output.array),
        )
        return output.tensor


class RmsNorm:
    """Divides rows, float32 or bfloat16, by their root mean square, and multiplies by a weight, as `LlamaRMSNorm`.

    Where `groups` divide a row, each by its own. With `gates`, SiLU of them is multiplied to the rows or the norm.
    """

    def __init__(self, norm: Any, offset: float = 0.0, groups: int = 1, gates: Gates | None = None) -> None:
        """Takes the weight [n], to which `offset` is added, and the epsilon of a norm of transformers."""
        self._weight = array_of(norm.weight.detach() + offset)
        self._epsilon = np.float32(getattr(norm, "variance_epsilon", None) or norm.eps)
        self._groups, self._gates = groups, gates

    def __call__(self, x: Tensor, output: Buffer, gate: Tensor | None = None) -> Tensor:
        """Writes the norm of x [rows, n], with a gate of its shape and dtype, to an output of these too."""
        x, gate = x.contiguous(), None if gate is None else gate.contiguous()
        launch(
            *(cpu_norm.rms_norm, x.data_ptr(), 0 if gate is None else gate.data_ptr(), self._weight, self._epsilon),
            *(self._groups, self._gates == "first", output.array),
        )
        return output.tensor
