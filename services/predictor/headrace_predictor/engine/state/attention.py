"""What attention takes, in plain torch and in the kernels for processors and GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_predictor.engine.state.cache import Array


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


def _no_tiles(most: int) -> Tensor:
    raise NotImplementedError("ranges without tiles")


@dataclass(frozen=True)
class Range:
    """The positions `firsts` to before `ends` [T] of its own sequence that each token attends to, int32.

    `owners` [T] are the tokens' rows of `table` [sequences, blocks of the longest], which is padded with block 0. For a
    GPU the first `decodes` tokens are those of as many sequences, and `tiles(n)` [tiles + 1] is where tiles of one
    sequence begin, and the last one ends: those that decode, then chunks of prompts in tiles of up to n tokens.
    """

    table: Tensor
    owners: Tensor
    firsts: Tensor
    ends: Tensor
    decodes: int = 0
    tiles: Callable[[int], Tensor] = _no_tiles

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Table, owners, firsts and ends for the processor's kernels."""
        return self.table.numpy(), self.owners.numpy(), self.firsts.numpy(), self.ends.numpy()
