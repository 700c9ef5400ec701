"""Classifies the exceptions of a step: caused by the request, by a lack of memory, or by the device.

A device error (an illegal access, a failed assertion in a kernel) is final for the process: CUDA returns it for every
later call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_predictor.engine.interface import EngineDeadError

_CPU_OUT_OF_MEMORY = "can't allocate memory"  # Text of torch's DefaultCPUAllocator, which raises a plain RuntimeError.


def check_numbers(logits: Tensor) -> None:
    """Raises RuntimeError if the logits are not numbers."""
    if bool(logits.isnan().any()):
        raise RuntimeError("the model's logits are not numbers")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_OUT_OF_MEMORY in str(error)


def is_device_error(error: BaseException) -> bool:
    """Whether no later call in this process can succeed."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, EngineDeadError | torch.AcceleratorError) or "CUDA error" in str(error)
