"""Classifies the exceptions of a step (caused by the request, by a lack of memory, or by the device), and isolates the
request that may crash its process.

A device error (an illegal access, a failed assertion in a kernel) is final for the process: CUDA returns it for every
later call.
"""

import threading

import torch
from torch import Tensor

from headrace.errors import NotReadyError
from headrace_predictor.engine.interface import EngineDeadError

# Texts of other errors: of torch's DefaultCPUAllocator, of cuBLAS, and of what CUDA itself or a launch of Triton lacks.
_NO_MEMORY = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
)
_OF_THE_DEVICE = ("CUDA error", "Triton Error [CUDA]")

_RETRY_AFTER_MS = 100


def check_numbers(logits: Tensor) -> None:
    """Raises RuntimeError if the logits are not numbers."""
    if bool(logits.isnan().any()):
        raise RuntimeError("the model's logits are not numbers")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _NO_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Whether no later call in this process can succeed."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, EngineDeadError | torch.AcceleratorError):
        return True
    return any(text in str(error) for text in _OF_THE_DEVICE)


class Isolation:
    """The one request of an engine that may run isolated; a holder is any object that identifies it. Thread-safe.

    A request runs isolated because it may crash its process, which has one engine. If two of them ran at a time, each
    would be suspected of the other's crash: so an engine isolates one request at a time, from its submission until its
    next token or its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object | None = None

    def acquire(self, holder: object) -> None:
        """Raises NotReadyError while another request holds it."""
        with self._lock:
            if self._holder is not None:
                raise NotReadyError("another request runs in isolation here", retry_after_ms=_RETRY_AFTER_MS)
            self._holder = holder

    def release(self, holder: object) -> None:
        """Releases it, if `holder` holds it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
