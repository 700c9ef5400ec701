"""Memory for the cache on the CPU, which grows as it is written.

The first write to a page of 2 MiB takes 0.1 ms, and 4 ms on a virtual machine whose host has no memory ready. So a
thread makes the pages before they are written, a few at a time: a step does not wait for them, and an idle model has
little more memory than it has used. Where the kernel cannot do that (before Linux 5.14), the first write makes them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 1 << 21
_AHEAD = 8 * _PAGE
_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>


class GrowingMemory:
    """`size` bytes of zeros. `expect` is for one thread at a time."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # A kernel without them.
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._size = size
        self._end = 0  # Pages before it exist or are being made.
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of it as a tensor."""
        return self._bytes.view(dtype).view(shape)

    def expect(self, end: int) -> None:
        """Has pages made for the bytes up to `end`, which are written next, and some more; returns at once."""
        if end + _AHEAD // 2 <= self._end or self._end == self._size:
            return
        start, self._end = self._end, min(self._size, end + _AHEAD)
        threading.Thread(target=self._make_pages, args=(start, self._end), name="cache-pages", daemon=True).start()

    def _make_pages(self, start: int, end: int) -> None:
        """Ends itself; what fails costs time only."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = self._bytes.data_ptr()
        # One at a time: meanwhile the process can map no other memory.
        for page in range(start // _PAGE * _PAGE, end, _PAGE):
            if madvise(address + page, min(_PAGE, self._size - page), _MADV_POPULATE_WRITE):
                return
