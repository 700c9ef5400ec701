"""The interface of model runners, which compute the steps; each runner serves a family of models."""

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.engine.state.sequence import Row


class ModelRunner(Protocol):
    """Computes the logits of a step's rows. Used only by the engine's thread."""

    @property
    def description(self) -> str:
        """Its kind in a word or two, for the log and ModelConfig."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The ids between prompt and output: an encoder-decoder model's decoder start token."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a block's contents depend only on the ids up to its end, and the stage of `scaling`."""

    @property
    def scores_prompts(self) -> bool:
        """Whether rows may have positions to score."""

    @property
    def scaling(self) -> Scaling | None:
        """How its keys depend on the length of their sequence, see Scaling; None: they do not."""

    def run(self, rows: Rows[Row]) -> Tensor:
        """Computes the rows' ids; returns the last logits [rows that sample, vocabulary] of rows that sample, in order.

        Rows with proposals, which only the runner of a `PromptLookup` has, have those of each proposed id too. After
        them, in the same order, come the logits of all positions that rows score. It may raise, and may then be
        called again with the same rows or some of them.
        """

    def clear(self, blocks: Rows[int]) -> None:
        """Zeroes what a failed sequence left in blocks that others will use."""

    def probe(self) -> None:
        """Runs a forward pass that affects no sequence; raises if it fails or if its logits are not numbers."""
