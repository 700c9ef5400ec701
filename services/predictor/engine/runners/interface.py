"""What computes a step: the interface of model runners, of which each serves a family of models."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from services.predictor.engine.state.sequence import Row


class ModelRunner(Protocol):
    """Turns the rows of a step into logits. Used by the engine's thread alone."""

    @property
    def description(self) -> str:
        """Its kind in a word or two, for log and ModelConfig."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What stands between prompt and output: an encoder-decoder model's decoder start token."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a block's contents depend on nothing but the ids up to its end."""

    @property
    def scores_prompts(self) -> bool:
        """Whether rows may have positions to score."""

    def run(self, rows: Rows[Row]) -> Tensor:
        """Computes the rows' ids; the logits [rows that sample, vocabulary] of each last one, in the rows' order.

        Behind them come the logits of all positions that rows score, in the same order.
        It may raise, and may then be called again with the same rows or some of them.
        """

    def clear(self, blocks: Rows[int]) -> None:
        """Wipes what a failed sequence left in blocks that others will use."""

    def probe(self) -> None:
        """A forward pass that touches no sequence; raises where the model cannot run any more, or gives no numbers."""
