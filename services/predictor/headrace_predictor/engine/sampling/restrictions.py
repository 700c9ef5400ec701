"""The part of the sampler that changes the logits of tokens that a request names: biases, allowed and bad tokens.

Each function takes scores [rows, vocabulary] and returns new ones, or the same tensor if no row has anything to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_predictor.engine.state.sequence import SamplingRow


def add_biases(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after the requests' own biases."""
    biased = [(i, row.restrictions) for i, row in enumerate(rows) if row.restrictions and row.restrictions.biases.size]
    if not biased:
        return scores
    at, _ = places([i for i, _ in biased], [one.biased_ids for _, one in biased], scores.device)
    biases = torch.from_numpy(np.concatenate([one.biases for _, one in biased])).to(scores)
    return scores.index_put(at, biases, accumulate=True)


def mask(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores without the tokens that are not allowed, and those that would complete a bad sequence."""
    restricted = [(i, row, row.restrictions) for i, row in enumerate(rows) if row.restrictions]
    if not restricted:
        return scores
    limited = [(i, one.allowed_ids) for i, _, one in restricted if one.allowed_ids.size]
    bad = [(i, np.array(one.bad_ids(row.output_ids), np.int64)) for i, row, one in restricted if one.bad]
    masked = scores.clone()
    if limited:
        indices = [i for i, _ in limited]
        at, _ = places(indices, [ids for _, ids in limited], scores.device)
        masked.index_fill_(0, torch.tensor(indices, device=scores.device), -torch.inf)
        masked[at] = scores[at]
    if bad:
        at, _ = places([i for i, _ in bad], [ids for _, ids in bad], scores.device)
        masked.index_put_(at, masked.new_tensor(-torch.inf))
    return masked


def places(
    indices: list[int], ids: list[NDArray[Any]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Row and token index of every id, and how many ids each row has."""
    lengths = [len(row_ids) for row_ids in ids]
    both = torch.from_numpy(np.stack([np.repeat(indices, lengths), np.concatenate(ids)])).to(device)
    return (both[0], both[1]), lengths
