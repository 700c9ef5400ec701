"""Takes the code of libraries out of this process's memory; on Linux only.

The host executes much code once, while it imports, and then sleeps. The pages stay in the system's cache, from which
this process and its forks map again what they execute.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MADV_DONTNEED = 4  # <asm-generic/mman-common.h>
_LEAST_BYTES = 1 << 20


def unmap_idle_code() -> None:
    """Unmaps pages that are executable and cannot be written: only these equal their file for certain."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if permissions == "r-xp" and name.startswith("/") and end - begin >= _LEAST_BYTES:
            madvise(begin, end - begin, _MADV_DONTNEED)
