"""Scalings of positions that depend on how long a sequence is (LongRoPE, dynamic NTK). Pure.

transformers picks the factors of a whole forward pass by its largest position. So in `generate` a token's key has those
of the length at the time of its computation: the prompt's, or the token's own position + 1 for a later one. Phi's
models compute their cache again where the factors change, so all their keys have those of the current length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scaling:
    """`limits`: lengths beyond which the factors change, ascending; `grows`: from there on with each length.

    `recomputes`: keys of other factors than the current ones are computed again.
    """

    limits: tuple[int, ...]
    grows: bool
    recomputes: bool

    def stage(self, length: int) -> int:
        """The shortest length with the factors of `length`, 0 up to the first limit."""
        passed = [limit for limit in self.limits if length > limit]
        return length if passed and self.grows else passed[-1] + 1 if passed else 0

    def base(self, prompt: int, length: int) -> int:
        """The stage of the first keys of a sequence with so many ids, of which `prompt` are the request's input."""
        return self.stage(max(prompt, length) if self.recomputes else prompt)
