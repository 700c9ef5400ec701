"""Which tokens the grammars of a step's rows allow.

Computed on the engine's thread, between the start of the forward pass and the sampling: a GPU computes the pass
meanwhile. A CPU does not; there the masks of 32 rows, of a vocabulary of 1,536, take about half a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_predictor.engine.state.sequence import Row

Masks = tuple[list[int], Tensor]  # Rows, and for each the tokens that it must not have, [rows, vocabulary] bool.


def forbidden_tokens(rows: Rows[Row], vocabulary: int) -> Masks | None:
    """The masks of rows that sample, if any has a grammar; `vocabulary` is the number of logits of a row.

    A row that cannot go on, because it is complete or has an error, may have any token, which nobody gets.
    """
    numbers = [i for i, row in enumerate(rows) if row.sequence.constraint is not None]
    if not numbers:
        return None
    constraints = [constraint for row in rows if (constraint := row.sequence.constraint) is not None]
    first = constraints[0]  # What concerns the vocabulary is the same for all.
    bits = np.zeros((len(constraints), first.mask_bytes), np.uint8)
    for mask, constraint in zip(bits, constraints, strict=True):
        constraint.fill(mask)
    flags: NDArray[np.bool_] = np.unpackbits(bits, axis=1, bitorder="little").view(np.bool_)
    allowed = np.zeros((len(constraints), vocabulary), bool)
    known = min(first.end_bit, vocabulary)
    allowed[:, :known] = flags[:, :known]
    allowed[:, first.eos_ids] = False
    continues: list[bool] = np.any(allowed, axis=1).tolist()
    ends: list[bool] = flags[:, first.end_bit].tolist()
    for i, (number, constraint) in enumerate(zip(numbers, constraints, strict=True)):
        sequence = rows[number].sequence
        if constraint.error is None and not continues[i]:
            constraint.stop(is_complete=ends[i])
        if constraint.has_ended:
            allowed[i] = True
        elif ends[i] and sequence.request.sampling.may_end(len(sequence.output_ids)):
            allowed[i, constraint.end_ids] = True
    return numbers, torch.from_numpy(~allowed)
