"""The compiled kernels for tensors: whether they apply, and the calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.predictor.engine.state.cache import KeyValueCache

try:
    from services.predictor.engine.cpu import attention as cpu_attention
    from services.predictor.engine.cpu import norm as cpu_norm
except ImportError:  # Numba is optional.
    cpu_attention = None  # type: ignore[assignment]

_UNROLL = 8  # The kernels' head sizes are multiples of this.
_DTYPES = (torch.float32, torch.bfloat16)


def takes(query: Tensor) -> bool:
    """Whether the kernel supports queries [..., head size] of this device, dtype and size."""
    return takes_heads(query.device, query.dtype, query.shape[-1])


def takes_heads(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernel supports attention with such heads."""
    return cpu_attention is not None and device.type == "cpu" and dtype in _DTYPES and head_size % _UNROLL == 0


def attend(
    cache: KeyValueCache,
    layer: int,
    table: Tensor,
    owners: Tensor,
    firsts: Tensor,
    ends: Tensor,
    packed: Tensor,
    query_heads: int,
    scale: float = 1.0,
    bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns the output [T, query heads, head size] for packed queries, keys, values [T, all heads, head size].

    `rotary` is cosines and sines [T, head size]. For the other arguments see attention.py.
    """
    output = torch.empty(packed.shape[0], query_heads, packed.shape[2], dtype=packed.dtype)
    stored = _array(packed)
    cosines, sines = (_array(tensor) for tensor in rotary) if rotary else (stored[:0, 0, :0], stored[:0, 0, :0])
    cpu_attention.attend(
        torch.get_num_threads(),
        *(stored, cosines, sines, _array(cache.keys[layer]), _array(cache.values[layer])),
        *(table.numpy(), owners.numpy(), firsts.numpy(), ends.numpy()),
        np.empty((query_heads, 0), dtype=np.float32) if bias is None else bias.numpy(),
        np.float32(scale),
        _array(output),
    )
    return output


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divides each row of x [..., n], float32 or bfloat16, by its root mean square, and multiplies by weight [n]."""
    output = torch.empty(x.shape, dtype=x.dtype)
    size = x.shape[-1]
    cpu_norm.rms_norm(_array(x.view(-1, size)), _array(weight), np.float32(epsilon), _array(output.view(-1, size)))
    return output


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory in the kernels' types."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
