"""What the kernels of kernels.py take; tests/support/plain_kernels.py has each in plain torch.

Keys are [blocks, heads, head size, page] and values [blocks, heads, page, value size] of one layer of the cache, whose
blocks are equally far apart, and whose strides beyond the first are those of a contiguous tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

INT8_BLOCK = 128  # Inputs that share a scale, as on the CPU.


class Matrix(NamedTuple):
    """Weights [outputs, inputs], biases [outputs], and of int8 weights the scales, float32 [outputs]."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None


class Scores(NamedTuple):
    """How attention weighs: the products' scale, the cap of scores (0: none), sinks [query heads].

    `bias` float32 [query heads, n] is added to a score: by the distance of its key, the furthest first, and constant
    beyond; or by the key's position, of which there are n at most.
    """

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None
    by_position: bool = False

    def added(self, positions: int, ends: Tensor) -> Tensor | None:
        """The bias [rows, query heads, tokens, positions] of tokens whose ranges end at `ends` [rows, tokens]."""
        if self.bias is None:
            return None
        last = self.bias.shape[1] - 1
        skipped = torch.zeros_like(ends) if self.by_position else ends - last - 1
        places = torch.arange(positions, device=ends.device) - skipped[..., None]
        return self.bias[:, places.clamp(0, last)].transpose(0, 1)


class Norm(NamedTuple):
    """A root mean square norm: weights [n]; [2, head size] for each query head and each key head."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Tokens:
    """The tokens of a step, int32 on the model's device: first `decodes` tokens of as many sequences, then chunks.

    `table` [sequences, blocks]; of each token, `owners` is its row of the table, and it attends to the positions from
    `firsts` to before `ends`, the last of which is its own. `tiles(n)` [tiles + 1]: where tiles of one sequence begin,
    and the last one ends: those that decode, then chunks in tiles of up to n tokens.
    """

    decodes: int
    table: Tensor
    owners: Tensor
    firsts: Tensor
    ends: Tensor
    tiles: Callable[[int], Tensor]


Attend = Callable[[Tensor, Tensor, Tensor, Tokens, Scores], Tensor]


class Operations(NamedTuple):
    """The functions of kernels.py."""

    attend: Attend
    linear: Callable[[Tensor, Matrix], Tensor]
    turn_and_store: Callable[[Tensor, tuple[Tensor, Tensor], Norm | None, Tensor, Tensor, Tokens], Tensor]
    add_norm: Callable[[Tensor, Tensor, Norm], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]
