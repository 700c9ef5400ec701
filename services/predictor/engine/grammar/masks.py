"""Computes which tokens the grammars of a step's rows allow, while the model computes the rows.

On one thread; llguidance does not hold the interpreter lock while it works.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.predictor.engine.state.constraint import Constraint
from services.predictor.engine.state.sequence import Row

Masks = tuple[list[int], Tensor]  # Rows, and for each the tokens that it must not have, [rows, vocabulary] bool.


class MaskComputer:
    """See the module; `begin` and the result are for the engine's thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def begin(self, rows: Rows[Row], vocabulary: int) -> Future[Masks] | None:
        """Starts on the masks of rows that sample, if any has a grammar."""
        constrained = [
            (i, row.sequence.constraint, row.sequence.request.sampling.may_end(len(row.sequence.output_ids)))
            for i, row in enumerate(rows)
            if row.sequence.constraint is not None
        ]
        return self._thread.submit(_masks, constrained, vocabulary) if constrained else None

    def close(self) -> None:
        """Ends the thread, once it is idle."""
        self._thread.shutdown(wait=False)


def _masks(constrained: list[tuple[int, Constraint, bool]], vocabulary: int) -> Masks:
    """A row that cannot go on, because it is complete or has an error, may have any token, which nobody gets."""
    first = constrained[0][1]  # What concerns the vocabulary is the same for all.
    bits = np.zeros((len(constrained), first.mask_bytes), np.uint8)
    for mask, (_, constraint, _) in zip(bits, constrained, strict=True):
        constraint.fill(mask)
    flags: NDArray[np.bool_] = np.unpackbits(bits, axis=1, bitorder="little").astype(bool)
    allowed = np.zeros((len(constrained), vocabulary), bool)
    known = min(first.end_bit, vocabulary)
    allowed[:, :known] = flags[:, :known]
    allowed[:, first.eos_ids] = False
    continues: list[bool] = np.any(allowed, axis=1).tolist()
    ends: list[bool] = flags[:, first.end_bit].tolist()
    for i, (_, constraint, may_end) in enumerate(constrained):
        if constraint.error is None and not continues[i]:
            constraint.stop(is_complete=ends[i])
        if constraint.has_ended:
            allowed[i] = True
        elif ends[i] and may_end:
            allowed[i, constraint.end_ids] = True
    return [i for i, _, _ in constrained], torch.from_numpy(~allowed)
