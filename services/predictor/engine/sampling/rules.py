"""The part of the sampler that follows a model's own rules, which its generation_config.json has: as `generate` does.

Each function takes scores [rows, vocabulary] and returns new ones, or the same tensor if no row has rules. They concern
the ids that the decoder has seen: prompt and output, or an encoder-decoder model's start token and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.predictor.engine.state.sequence import SamplingRow


def add_rule_biases(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after `sequence_bias`."""
    biased = [(i, row) for i, row in enumerate(rows) if row.rules is not None and row.rules.biases]
    if not biased:
        return scores
    scores = scores.clone()
    for i, row in biased:
        ids = _decoded(row)
        for sequence, bias in row.rules.biases if row.rules else ():
            if _follows(ids, sequence):
                scores[i, sequence[-1]] += bias
    return scores


def apply_rules(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after all other rules; last of all, because a forced token takes precedence."""
    ruled = [i for i, row in enumerate(rows) if row.rules is not None]
    if not ruled:
        return scores
    scores = scores.clone()
    for i in ruled:
        _apply(scores[i], rows[i])
    return scores


def _apply(scores: Tensor, row: SamplingRow) -> None:
    rules, ids, produced = row.rules, _decoded(row), len(row.output_ids)
    if rules is None:
        return
    eos = list(rules.eos_ids)
    if rules.decay is not None and produced > rules.decay[0]:
        start, factor = rules.decay
        ends = scores[eos]
        scores[eos] = torch.where(ends.isfinite(), ends + ends.abs() * (factor ** (produced - start) - 1), ends)
    banned = {*rules.suppressed, *(sequence[-1] for sequence in rules.bad if _follows(ids, sequence))}
    banned |= _repeats(ids, ids, rules.ngram) | _repeats(np.asarray(row.input_ids), ids, rules.encoder_ngram)
    is_only_start = len(ids) - produced == 1  # Of the decoder's ids, before the first output.
    if produced == (1 if is_only_start and rules.forced_bos is not None else 0):
        banned.update(rules.begin_suppressed)
    if len(ids) < rules.min_length:
        banned.update(eos)
    if banned:
        scores[list(banned)] = -torch.inf
    forced = [] if rules.forced_bos is None or len(ids) != 1 else [rules.forced_bos]
    if produced + 1 == row.sampling.max_tokens:
        forced = forced or list(rules.forced_eos)
    if forced:
        scores.fill_(-torch.inf)
        scores[forced] = 0.0


def _decoded(row: SamplingRow) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(ids, np.int64) for ids in (row.start_ids or row.input_ids, row.output_ids)])


def _follows(ids: NDArray[np.int64], sequence: tuple[int, ...]) -> bool:
    """Whether the ids end with all of a sequence but its last id."""
    before = len(sequence) - 1
    return before == 0 or (before < len(ids) and ids[-before:].tolist() == list(sequence[:-1]))


def _repeats(text: NDArray[Any], ids: NDArray[np.int64], size: int) -> set[int]:
    """The tokens that would make the last `size` ids a sequence that `text` has."""
    if not size or len(text) < size or len(ids) < size - 1:
        return set()
    windows = np.lib.stride_tricks.sliding_window_view(text, size)
    last = ids[len(ids) - size + 1 :]
    return set(windows[(windows[:, :-1] == last).all(1), -1].tolist())
