"""The compiled attention kernel for tensors: where it can be used, and the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.predictor.engine.cache import KeyValueCache

try:
    from services.predictor.engine import cpu_attention
except ImportError:  # Numba is optional.
    cpu_attention = None  # type: ignore[assignment]

_UNROLL = 8  # The kernel's head sizes are multiples of it.


def takes(query: Tensor) -> bool:
    """Whether it computes queries [..., head size] of this device, dtype and size."""
    return (
        cpu_attention is not None
        and query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.shape[-1] % _UNROLL == 0
    )


def attend(
    cache: KeyValueCache,
    layer: int,
    table: Tensor,
    owners: Tensor,
    firsts: Tensor,
    ends: Tensor,
    query: Tensor,
    written: tuple[Tensor, Tensor] | None,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Output as the query [T, query heads, head size]; `written` are keys and values [T, heads, head size].

    What the arguments mean is said in `cpu_attention`.
    """
    output = torch.empty(query.shape, dtype=query.dtype)
    key, value = (query[:0], query[:0]) if written is None else written
    no_bias = np.empty((query.shape[1], 0), dtype=np.float32)
    cpu_attention.attend(
        torch.get_num_threads(),
        *(_array(query), _array(key), _array(value), _array(cache.keys[layer]), _array(cache.values[layer])),
        *(table.numpy(), owners.numpy(), firsts.numpy(), ends.numpy()),
        no_bias if bias is None else bias.numpy(),
        np.float32(scale),
        _array(output),
    )
    return output


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as the kernel takes it."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
