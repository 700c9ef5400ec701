"""What an exception of a step says: of the request, of memory, or of the device.

An error of the device (an illegal access, a failed assertion in a kernel) is final for the process:
CUDA answers every later call with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.predictor.engine.interface import EngineDeadError

_CPU_OUT_OF_MEMORY = "can't allocate memory"  # Of torch's DefaultCPUAllocator, which raises a plain RuntimeError.


def check_numbers(logits: Tensor) -> None:
    """Raises RuntimeError where a model gives what is no number."""
    if bool(logits.isnan().any()):
        raise RuntimeError("the model's logits are not numbers")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_OUT_OF_MEMORY in str(error)


def is_device_error(error: BaseException) -> bool:
    """Whether nothing will succeed any more in this process."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, EngineDeadError | torch.AcceleratorError) or "CUDA error" in str(error)
