"""What the kernels take.

Keys are [blocks, heads, head size, page] and values [blocks, heads, page, value size] of one layer of the cache, whose
strides beyond the first two are those of a contiguous tensor. tests/support/plain_kernels.py has each operation in
plain torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Scores(NamedTuple):
    """How attention weighs: the products' scale, the cap of scores (0: none), sinks [query heads]."""

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a step, int32 on the model's device: first `decodes` tokens of as many sequences, then chunks.

    `table` [sequences, blocks]; of each token, `owners` is its row of the table, and it attends to the positions from
    `firsts` to before `ends`, the last of which is its own. `tiles(n)`: the chunks in tiles of up to n tokens,
    [tiles, 3]: first token, number of tokens, row of the table.
    """

    decodes: int
    table: Tensor
    owners: Tensor
    firsts: Tensor
    ends: Tensor
    tiles: Callable[[int], Tensor]


class HeadNorms(NamedTuple):
    """Root mean square norms of each query and each key head: weights [head size]."""

    query: Tensor
    key: Tensor
    epsilon: float


class Attend(Protocol):
    """Paged attention."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, scores: Scores) -> Tensor:
        """Output [T, query heads, value size] of queries [T, query heads, head size].

        The keys and values of the tokens are in the cache already.
        """


class Operations(Protocol):
    """The operations of a decoder."""

    @property
    def attend(self) -> Attend: ...

    def turn_and_store(
        self,
        packed: Tensor,
        rotary: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        keys: Tensor,
        values: Tensor,
        tokens: Tokens,
    ) -> Tensor:
        """Norms and turns queries and keys of `packed` [T, queries, keys and values]; stores keys and values.

        Returns the queries [T, query heads, head size]. `rotary`: cosines and sines [T, head size].
        """

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The sum [T, n], and its root mean square norm times `weight` [n]."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of each row, times its second half."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear` of x [T, inputs]."""
