"""The interface of model runners, which compute the steps; each runner serves a family of models."""

from abc import ABC, abstractmethod
from collections.abc import Container
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from headrace_predictor.engine.cpu.recording import Passes
from headrace_predictor.engine.faults import check_numbers
from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.engine.state.sequence import Row, detached_sequence

_STEPS = 5  # Of a trial: a model may have few positions.


class ModelRunner(ABC):
    """Computes the logits of a step's rows. Used only by the engine's thread."""

    description: str  # Its kind in a word or two, for the log and ModelConfig.
    start_ids: tuple[int, ...] = ()  # Between prompt and output: an encoder-decoder model's decoder start token.
    prefix_states: Container[bytes] | None = None  # Of a runner with recurrent states, see Holdings.
    reuses_prefixes = False  # Whether a block's contents depend only on the ids up to its end, and `scaling`'s stage.
    scores_prompts = False  # Whether rows may have positions to score.
    scaling: Scaling | None = None  # How its keys depend on the length of their sequence; None: they do not.
    reads_whole_prompts = False  # Whether a prompt is computed in one pass, with its last chunk.

    repeats = False  # Whether it has passes for `record_passes`.
    passes: Passes | None = None  # Recorded ones of rows that decode, see `record_passes`.

    @abstractmethod
    def run(self, rows: Rows[Row]) -> Tensor:
        """Computes the rows' ids; returns the last logits [rows that sample, vocabulary] of rows that sample, in order.

        Rows with proposals, which only the runner of a `PromptLookup` has, have those of each proposed id too. After
        them, in the same order, come the logits of all positions that rows score. It may raise, and may then be
        called again with the same rows or some of them.
        """

    @abstractmethod
    def clear(self, blocks: Rows[int]) -> None:
        """Zeroes what a failed sequence left in blocks that others will use."""

    def probe(self) -> None:
        """Runs a forward pass that affects no sequence; raises if it fails or if its logits are not numbers."""
        check_numbers(self.run([first_row()]))

    def record_passes(self) -> None:
        """Records passes from now on, if repeated ones have the bits of others. For a model that stays as it is."""
        expected, self.passes = self._try_decoding(), Passes()
        if not torch.equal(expected, self._try_decoding()):
            self.passes = None

    def _try_decoding(self) -> Tensor:
        """Logits of two sequences of different lengths, for some steps."""
        sequences, found = [detached_sequence([0] * length) for length in (1, 3)], []
        for step in range(_STEPS):
            for one in sequences:
                one.blocks = [0]
            found.append(self.run([Row(one, one.computed, len(one.ids) - one.computed) for one in sequences]))
            for one in sequences:
                one.computed = len(one.ids)
                one.ids.append(step % 2)
        return torch.cat(found)


def first_row() -> Row:
    """That of a sequence with one id, in the reserved block."""
    sequence = detached_sequence([0])
    sequence.blocks = [0]
    return Row(sequence, 0, 1)
