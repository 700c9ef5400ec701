"""The memory of the KV cache: for every layer a pool of keys and one of values, in blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Rows
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.predictor.engine.state.arrays import Array, array_of

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class CacheShape:
    """What a model's layers store for each token."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values in all layers."""
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


class KeyValueCache:
    """Keys [blocks, heads, head size, BLOCK_TOKENS] and values [blocks, heads, BLOCK_TOKENS, head size] by layer.

    Keys are transposed for the products that read them. The cache starts as zeros, and must never contain NaN or
    infinity at masked positions that are read: zero times NaN is NaN.
    """

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device

        def zeros(*block: int) -> list[Tensor]:
            size = (blocks, shape.heads, *block)
            return [_zeros(size, shape.dtype, device) for _ in range(shape.layers)]

        self.keys = zeros(shape.head_size, BLOCK_TOKENS)
        self.values = zeros(BLOCK_TOKENS, shape.head_size)

    @cached_property
    def arrays(self) -> list[tuple[Array, Array]]:
        """Keys and values by layer as arrays on the same memory, for the compiled kernels."""
        return [(array_of(keys), array_of(values)) for keys, values in zip(self.keys, self.values, strict=True)]

    def write(self, layer: int, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, heads, head size] at blocks and offsets [tokens]."""
        blocks, offsets = places
        self.keys[layer][blocks, :, :, offsets] = keys
        self.values[layer][blocks, :, offsets] = values

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of blocks [rows, n]: keys [rows, heads, size, tokens] and values [rows, heads, tokens, size]."""
        rows, count = blocks.shape
        shape = self.shape
        flat = blocks.reshape(-1)
        keys = self.keys[layer].index_select(0, flat).view(rows, count, shape.heads, shape.head_size, BLOCK_TOKENS)
        values = self.values[layer].index_select(0, flat).view(rows, count, shape.heads, BLOCK_TOKENS, shape.head_size)
        return (
            keys.permute(0, 2, 3, 1, 4).reshape(rows, shape.heads, shape.head_size, count * BLOCK_TOKENS),
            values.transpose(1, 2).reshape(rows, shape.heads, count * BLOCK_TOKENS, shape.head_size),
        )

    def clear(self, blocks: Rows[int]) -> None:
        """Zeroes blocks in all layers."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            for pool in (*self.keys, *self.values):
                pool.index_fill_(0, index, 0)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU they take no memory until they are written, unlike those of torch's allocator."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel without them.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)
