"""Tensors of the CPU as numpy arrays on the same memory, as the compiled kernels take them.

numpy has no bfloat16: such numbers are uint16 there, their bits.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


def array_of(tensor: Tensor) -> Array:
    """The tensor's memory, or that of a contiguous copy."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
