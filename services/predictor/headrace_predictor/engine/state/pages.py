"""Memory for the cache on the CPU, which grows as it is written.

The first write to a page of 2 MiB takes 0.1 ms, and 4 ms or more on a virtual machine whose host has no memory ready.
So threads make the pages before they are written, one for each step at most: a step hardly waits for them even on a
single core, and an idle model has little more memory than it has used. Where the kernel cannot do that (before Linux
5.14), the first write makes them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 1 << 21
_AHEAD = 4 * _PAGE
_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>


class GrowingMemory:
    """`size` bytes of zeros. `expect` is for one thread only."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # A kernel without them.
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._size = size
        self._next = 0  # The first page that is not made yet.
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of it as a tensor."""
        return self._bytes.view(dtype).view(shape)

    def expect(self, end: int) -> None:
        """Starts to make one more page if few are made behind `end`, where the next writes end; returns at once."""
        page = max(self._next, end // _PAGE * _PAGE)
        if page < min(self._size, end + _AHEAD):
            self._next = page + _PAGE
            threading.Thread(target=self._make, args=(page,), name="cache-page", daemon=True).start()

    def _make(self, page: int) -> None:
        """Ends itself; if it fails, the first write makes the page."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(self._bytes.data_ptr() + page, min(_PAGE, self._size - page), _MADV_POPULATE_WRITE)
