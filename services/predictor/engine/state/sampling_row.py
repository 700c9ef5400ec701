"""The sampler's input for a row of logits. Without torch, because the scheduler creates these too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from millrace.sampling import SamplingParameters


class SamplingRow(NamedTuple):
    """One row of logits: its parameters, the ids for penalties, and the model's own end tokens.

    Ids may be arrays: lists are converted at each step if a row has penalties.
    """

    sampling: SamplingParameters
    input_ids: Sequence[int] | NDArray[Any]
    output_ids: Sequence[int] | NDArray[Any]
    end_ids: frozenset[int]
