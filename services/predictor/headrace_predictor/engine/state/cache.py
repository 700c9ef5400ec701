"""The memory of the KV cache, in blocks: each has the keys and values of its tokens in all layers.

A block is contiguous, so that the memory in use grows with the tokens. A virtual machine may need milliseconds for the
first write to a page of 2 MiB: with a pool for each layer, all pools would come to a new page in the same step.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence as Rows
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_PAGE = 1 << 21
_AHEAD = 4 * _PAGE
_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>
BLOCK_TOKENS = 32


def array_of(tensor: Tensor) -> Array:
    """The tensor's memory, or that of a contiguous copy; bfloat16, which numpy lacks, as uint16, its bits."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def on_device(values: Any, dtype: Any, device: torch.device) -> Tensor:
    """A copy of numbers on a device; to a GPU from pinned memory, so that nothing waits for it."""
    # numpy reads a list in half of torch's time.
    tensor = torch.from_numpy(np.array(values, dtype=dtype))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class GrowingMemory:
    """`size` bytes of zeros, which grow as they are written. `expect` is for one thread only.

    The first write to a page of 2 MiB takes 0.1 ms, and 4 ms or more on a virtual machine whose host has no memory
    ready. So threads make the pages before they are written, one for each step at most: a step hardly waits for them
    even on a single core, and an idle model has little more memory than it has used. Where the kernel cannot do that
    (before Linux 5.14), the first write makes them.
    """

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


class LayerShape(NamedTuple):
    """What a layer stores for each token: `heads` keys and as many values. It may read those of an earlier `source`."""

    heads: int
    key_size: int
    value_size: int
    source: int | None = None


@dataclass(frozen=True)
class CacheShape:
    """What a model's layers store for each token: equal keys and values, unless `own` has each layer's own."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    own: tuple[LayerShape, ...] = ()

    def of(self, layer: int) -> LayerShape:
        """What a layer stores."""
        return self.own[layer] if self.own else LayerShape(self.heads, self.head_size, self.head_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values in all layers."""
        return self._places[0] * self.dtype.itemsize

    def slots(self, layer: int) -> tuple[int, int]:
        """The places of a layer's keys and of its values in a block, in multiples of the numbers of each."""
        source = self.of(layer).source
        return self._places[1][layer if source is None else source]

    @cached_property
    def _places(self) -> tuple[int, dict[int, tuple[int, int]]]:
        """The numbers of a token, and the slots of each layer that stores something.

        What has one size is together, and begins at a multiple of its size.
        """
        storing = [layer for layer in range(self.layers) if self.of(layer).source is None]
        parts = [
            (self.of(layer).heads * size, layer, which)
            for layer in storing
            for which, size in enumerate((self.of(layer).key_size, self.of(layer).value_size))
        ]
        sizes = sorted({size for size, *_ in parts}, reverse=True)
        slots: dict[tuple[int, int], int] = {}
        end = 0
        for size in sizes:
            end = -(-end // size)
            for _, layer, which in (part for part in parts if part[0] == size):
                slots[layer, which] = end
                end += 1
            end *= size
        whole = math.lcm(*sizes)
        return -(-end // whole) * whole, {layer: (slots[layer, 0], slots[layer, 1]) for layer in storing}


class LayerArrays(NamedTuple):
    """A layer of the cache for the compiled kernels: the memory of all layers in two shapes, and the layer's slots.

    Keys [blocks, slots, heads, head size, BLOCK_TOKENS], values [blocks, slots, heads, BLOCK_TOKENS, head size].
    """

    keys: Array
    values: Array
    key_slot: int
    value_slot: int


class KeyValueCache:
    """Keys [blocks, heads, head size, BLOCK_TOKENS] and values [blocks, heads, BLOCK_TOKENS, head size] by layer.

    Keys are transposed for the products that read them. The cache starts as zeros, and must never contain NaN or
    infinity at masked positions that are read: zero times NaN is NaN.
    """

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        size = (blocks, shape.bytes_per_token // shape.dtype.itemsize * BLOCK_TOKENS)
        self._growing: GrowingMemory | None = None
        if device.type == "cpu":
            self._growing = GrowingMemory(math.prod(size) * shape.dtype.itemsize)
            self._memory = self._growing.tensor(size, shape.dtype)
        else:
            self._memory = torch.zeros(size, dtype=shape.dtype, device=device)
        self.keys = [self._keys(layer)[:, shape.slots(layer)[0]] for layer in range(shape.layers)]
        self.values = [self._values(layer)[:, shape.slots(layer)[1]] for layer in range(shape.layers)]

    @cached_property
    def arrays(self) -> list[LayerArrays]:
        """The layers for the compiled kernels, on the same memory."""
        return [
            LayerArrays(array_of(self._keys(layer)), array_of(self._values(layer)), *self.shape.slots(layer))
            for layer in range(self.shape.layers)
        ]

    def _keys(self, layer: int) -> Tensor:
        """The memory in the form of a layer's keys, [blocks, slots, ...]."""
        heads, size, _, _ = self.shape.of(layer)
        return self._memory.view(len(self._memory), -1, heads, size, BLOCK_TOKENS)

    def _values(self, layer: int) -> Tensor:
        heads, _, size, _ = self.shape.of(layer)
        return self._memory.view(len(self._memory), -1, heads, BLOCK_TOKENS, size)

    def expect(self, last: int) -> None:
        """Prepares memory for the blocks up to `last`, before they are written; need not be called."""
        if self._growing is not None:
            self._growing.expect((last + 1) * BLOCK_TOKENS * self.shape.bytes_per_token)

    def write(self, layer: int, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, heads, head size] at blocks and offsets [tokens]."""
        blocks, offsets = places
        self.keys[layer][blocks, :, :, offsets] = keys
        self.values[layer][blocks, :, offsets] = values

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of blocks [rows, n]: keys [rows, heads, size, tokens] and values [rows, heads, tokens, size]."""
        rows, count = blocks.shape
        flat = blocks.reshape(-1)
        heads, size = self.keys[layer].shape[1:3]
        value_size = self.values[layer].shape[3]
        return (
            self.keys[layer]
            .index_select(0, flat)
            .view(rows, count, heads, size, BLOCK_TOKENS)
            .permute(0, 2, 3, 1, 4)
            .reshape(rows, heads, size, count * BLOCK_TOKENS),
            self.values[layer]
            .index_select(0, flat)
            .view(rows, count, heads, BLOCK_TOKENS, value_size)
            .transpose(1, 2)
            .reshape(rows, heads, count * BLOCK_TOKENS, value_size),
        )

    def clear(self, blocks: Rows[int]) -> None:
        """Zeroes blocks in all layers."""
        if blocks:
            self._memory.index_fill_(0, on_device(blocks, np.int64, self.device), 0)
