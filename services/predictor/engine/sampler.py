"""The stateless sampler: logits to token ids, every row by its own parameters, in one vectorised pass.

The uniform number for output position n is a hash of (seed, n), and the sampled id is the inverse of
the cumulative distribution at it, summed in float64 in the order of token ids after all masks. So
nothing is remembered between tokens: a sequence continued elsewhere from its own ids goes on as it
would have gone on.

Order: penalties, then the minimum length, then temperature, top-k, top-p, min-p. Log probabilities
are those of the model's raw logits, in nats.
Sources: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators");
repetition penalty (Keskar et al. 2019, CTRL); nucleus sampling (Holtzman et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.sampling import GREEDY_BELOW, SamplingParameters

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits: its parameters and the ids that penalties and the minimum length look at."""

    sampling: SamplingParameters
    input_ids: Rows[int]
    output_ids: Rows[int]
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Sampled:
    """Token ids and log probabilities, one for each row; the latter only where a row asks for them."""

    token_ids: list[int]
    logprobs: list[float | None]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of seed and output position."""
    state = _mix((seed & _MASK) ^ _mix(position + 1))
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Rows[SamplingRow]) -> Sampled:
    """Chooses a token for each row of `logits` [rows, vocabulary]."""
    raw = logits.float()
    scores = _mask_early_end(_penalise(raw, rows), rows)
    greedy = scores.argmax(-1)
    sampled = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if sampled:
        chosen = _invert(_filter(scores[sampled], [rows[i].sampling for i in sampled]), [rows[i] for i in sampled])
        greedy[torch.tensor(sampled, device=greedy.device)] = chosen
    token_ids: list[int] = greedy.tolist()
    logprobs: list[float | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs]
    if asked:
        picked = raw[asked].log_softmax(-1).gather(1, greedy[asked, None])[:, 0].tolist()
        for i, value in zip(asked, picked, strict=True):
            logprobs[i] = value
    return Sampled(token_ids, logprobs)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 after one increment."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _penalise(scores: Tensor, rows: Rows[SamplingRow]) -> Tensor:
    """Scores after repetition, presence and frequency penalties."""
    changed = scores
    for i, row in enumerate(rows):
        s = row.sampling
        if s.repetition_penalty == 1.0 and s.presence_penalty == 0.0 and s.frequency_penalty == 0.0:
            continue
        if changed is scores:
            changed = scores.clone()
        produced = torch.tensor(row.output_ids, dtype=torch.long, device=scores.device)
        seen = torch.tensor(sorted({*row.input_ids, *row.output_ids}), device=scores.device)
        before = changed[i, seen]
        changed[i, seen] = torch.where(before > 0, before / s.repetition_penalty, before * s.repetition_penalty)
        counts = torch.bincount(produced, minlength=scores.shape[1])
        changed[i] -= s.presence_penalty * (counts > 0) + s.frequency_penalty * counts
    return changed


def _mask_early_end(scores: Tensor, rows: Rows[SamplingRow]) -> Tensor:
    """Scores that cannot end a row before its minimum length."""
    early = [i for i, row in enumerate(rows) if len(row.output_ids) < row.sampling.min_tokens and row.end_ids]
    if early:
        scores = scores.clone()
        for i in early:
            scores[i, list(rows[i].end_ids)] = -torch.inf
    return scores


def _filter(scores: Tensor, parameters: Rows[SamplingParameters]) -> Tensor:
    """Float64 probabilities of what temperature, top-k, top-p and min-p leave, not normalised again."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    scores = scores.double() / column([s.temperature for s in parameters])
    if any(s.top_k > 0 or s.top_p < 1 for s in parameters):
        ordered = scores.sort(-1, descending=True).values
        size = scores.shape[1]
        ranks = [(min(s.top_k, size) if s.top_k > 0 else size) - 1 for s in parameters]
        kth = torch.tensor(ranks, device=scores.device)[:, None]
        # A value and not a rank is the limit: tokens that tie with the last one kept are kept.
        limit = ordered.gather(1, kth)
        ordered = ordered.masked_fill(ordered < limit, -torch.inf)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        inside = (before < column([s.top_p for s in parameters])) & (ordered >= limit)
        last = inside.sum(-1, keepdim=True).clamp(min=1) - 1
        scores = scores.masked_fill(scores < ordered.gather(1, last), -torch.inf)
    probabilities = scores.softmax(-1)
    if any(s.min_p > 0 for s in parameters):
        floor = probabilities.amax(-1, keepdim=True) * column([s.min_p for s in parameters])
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def _invert(probabilities: Tensor, rows: Rows[SamplingRow]) -> Tensor:
    """The ids at which the cumulative distributions reach each row's uniform number."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    if not total.isfinite().all():
        raise ArithmeticError("the model's logits are not numbers")
    numbers = [uniform(row.sampling.seed or 0, len(row.output_ids)) for row in rows]
    target = torch.tensor(numbers, dtype=torch.float64, device=probabilities.device)[:, None] * total
    chosen = torch.searchsorted(cumulative, target, right=True)
    # Rounding can put the target on the total itself, beyond the last id that has any probability.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(chosen, last)[:, 0]
