"""The parts of the sampler that change the logits of single tokens: those that a request names, and a model's rules.

A request has biases, allowed and bad tokens; a model's rules are those of its generation_config.json, as `generate`
follows them. Each function takes scores [rows, vocabulary] and returns new ones, or the same tensor if no row has
anything to change. The rules concern the ids that the decoder has seen: prompt and output, or an encoder-decoder
model's start token and output.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_predictor.engine.state.cache import on_device
from headrace_predictor.engine.state.sequence import SamplingRow


def add_biases(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after the requests' own biases."""
    biased = [(i, row.restrictions) for i, row in enumerate(rows) if row.restrictions and row.restrictions.biases.size]
    if not biased:
        return scores
    at, _ = places([i for i, _ in biased], [one.biased_ids for _, one in biased], scores.device)
    biases = on_device(np.concatenate([one.biases for _, one in biased]), np.float64, scores.device)
    return scores.index_put(at, biases.to(scores.dtype), accumulate=True)


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
        masked.index_fill_(0, on_device(indices, np.int64, scores.device), -torch.inf)
        masked[at] = scores[at]
    if bad:
        at, _ = places([i for i, _ in bad], [ids for _, ids in bad], scores.device)
        masked.index_put_(at, masked.new_full((), -torch.inf))
    return masked


def places(
    indices: list[int], ids: list[NDArray[Any]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Row and token index of every id, and how many ids each row has."""
    lengths = [len(row_ids) for row_ids in ids]
    both = on_device(np.stack([np.repeat(indices, lengths), np.concatenate(ids)]), np.int64, device)
    return (both[0], both[1]), lengths


def add_rule_biases(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after `sequence_bias`."""
    for i, row in enumerate(rows):
        if row.rules is not None and row.rules.sequence_bias:
            ids, scores = _decoded(row), scores.clone()
            for sequence, bias in row.rules.sequence_bias:
                if sequence[-1] < scores.shape[1] and _follows(ids, sequence):
                    scores[i, sequence[-1]] += bias
    return scores


def apply_rules(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after all other rules; last of all, because a forced token takes precedence."""
    ruled = [i for i, row in enumerate(rows) if row.rules is not None]
    scores = scores.clone() if ruled else scores
    for i in ruled:
        _apply(scores[i], rows[i])
    return scores


def _apply(scores: Tensor, row: SamplingRow) -> None:
    rules, ids, produced = row.rules, _decoded(row), len(row.output_ids)
    if rules is None:
        return

    def at(token_ids: Iterable[int]) -> Tensor:
        return on_device([*token_ids], np.int64, scores.device)

    eos = at(row.end_ids)
    if rules.exponential_decay_length_penalty is not None:
        start, factor = rules.exponential_decay_length_penalty
        ends = scores[eos]
        gain = ends.abs() * (factor ** max(produced - start, 0) - 1)
        scores[eos] = torch.where(ends.isfinite(), ends + gain, ends)
    banned = {*rules.suppress_tokens}
    words = (bad for bad in rules.bad_words_ids if len(bad) > 1 or bad[0] not in row.end_ids)
    banned.update(bad[-1] for bad in words if _follows(ids, bad))
    banned |= _repeats(ids, ids, rules.no_repeat_ngram_size)
    banned |= _repeats(np.asarray(row.input_ids), ids, rules.encoder_no_repeat_ngram_size)
    has_start_only = len(ids) - produced == 1  # Of the decoder's ids, before the first output.
    if produced == int(has_start_only and rules.forced_bos_token_id is not None):
        banned.update(rules.begin_suppress_tokens)
    if len(ids) < rules.min_length:
        banned.update(row.end_ids)
    scores[at(token_id for token_id in banned if token_id < len(scores))] = -torch.inf
    forced = rules.forced_eos_token_id if produced + 1 == row.sampling.max_tokens else ()
    if not forced and rules.forced_bos_token_id is not None and len(ids) == 1:
        forced = (rules.forced_bos_token_id,)
    if forced:
        scores.fill_(-torch.inf)
        scores[at(forced)] = 0.0


def _decoded(row: SamplingRow) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(ids, np.int64) for ids in (row.start_ids or row.input_ids, row.output_ids)])


def _follows(ids: NDArray[np.int64], sequence: tuple[int, ...]) -> bool:
    """Whether the ids end with all of a sequence but its last id."""
    before = len(sequence) - 1
    return before == 0 or ids[-before:].tolist() == list(sequence[:-1])


def _repeats(text: NDArray[Any], ids: NDArray[np.int64], size: int) -> set[int]:
    """The tokens that would make the last `size` ids a sequence that `text` has."""
    if not size or len(text) < size or len(ids) < size - 1:
        return set()
    windows = np.lib.stride_tricks.sliding_window_view(text, size)
    last = ids[len(ids) - size + 1 :]
    return set(windows[(windows[:, :-1] == last).all(1), -1].tolist())
