"""Returns memory to the machine after a model has been unloaded."""

from __future__ import annotations

import gc
import sys

from headrace.rpc.limits.byte_budget import give_memory_back


def release_memory() -> None:
    """Frees unreferenced memory, on the device and on the heap; blocks for a fraction of a second."""
    gc.collect()  # Modules and their hooks may refer to each other.
    torch = sys.modules.get("torch")  # Without it nothing is on the device.
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # glibc keeps freed memory, and more of it with the allocator settings that make big tensors fast.
    give_memory_back()
