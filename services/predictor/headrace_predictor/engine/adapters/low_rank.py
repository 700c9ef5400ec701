"""The low-rank product that an adapter adds to the output of a linear layer: scale · B(A(x)).

Source: Hu et al. 2021, LoRA. The scale is part of B. Where a model's weights are packed, so are these, because the sums
of a packed product do not depend on the other rows: see packed_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_predictor.engine.cpu.packed_linear import PackedLinear

_T = TypeVar("_T")


class LowRankWeights(NamedTuple):
    """`down` [rank, in] and `up` [out, rank], with the scale."""

    down: Tensor
    up: Tensor

    @property
    def size(self) -> int:
        """Bytes of both."""
        return self.down.nbytes + self.up.nbytes


class LowRank:
    """x [n, in] to [n, out]."""

    def __init__(self, weights: LowRankWeights, packed: bool) -> None:
        self._down, self._up = (_product(weight, packed) for weight in weights)

    def __call__(self, x: Tensor) -> Tensor:
        return self._up(self._down(x))

    @classmethod
    def joined(cls, parts: Sequence[LowRankWeights | None], sizes: Sequence[int], packed: bool) -> LowRank | None:
        """One product for layers with the same input, whose outputs of `sizes` are concatenated; None if all are None.

        The output of a part that is None is zero.
        """
        present = [part for part in parts if part is not None]
        if not present:
            return None
        down = torch.cat([part.down for part in present])
        up = down.new_zeros(sum(sizes), len(down))
        row = column = 0
        for part, size in zip(parts, sizes, strict=True):
            if part is not None:
                rank = len(part.down)
                up[row : row + size, column : column + rank] = part.up
                column += rank
            row += size
        return cls(LowRankWeights(down, up), packed)


@dataclass(eq=False)
class Adapter:
    """The products of a loaded adapter: those of fused layers by layer, in a form of their own, others by module path.

    `number` is unique in its engine, also after the adapter has been unloaded.
    """

    number: int
    layers: dict[nn.Module, object]
    modules: dict[str, LowRank]


class AdaptedTokens(NamedTuple):
    """Tokens `begin` to `end` of a step, which have this adapter."""

    adapter: Adapter
    begin: int
    end: int


class Part(NamedTuple):
    """The tokens `begin` to `end` of a step, and what a layer adds for them."""

    begin: int
    end: int
    product: LowRank

    def add(self, x: Tensor, output: Tensor) -> None:
        """Adds the product of inputs [T, in] to outputs [T, out], in place."""
        output[self.begin : self.end].add_(self.product(x[self.begin : self.end]))


def _product(weight: Tensor, packed: bool) -> Callable[[Tensor], Tensor]:
    if packed:
        return PackedLinear(weight, None).forward
    return partial(functional.linear, weight=weight)
