"""The stateless sampler: logits to token ids, each row with its own parameters, in one vectorised pass.

The uniform number for output position n is a hash of (seed, n), and the sampled id is the inverse of the cumulative
distribution at it, summed in float64 in the order of token ids after all masks. So there is no state between tokens: a
sequence that resumes elsewhere from its own ids continues with the same tokens. The result of a row depends on that row
only, never on its neighbours.

Order: bias, penalties, the masks of allowed and bad tokens, of grammars and of the minimum length, the model's own
rules (rules.py), then temperature, top-k, top-p, min-p. As in vLLM, a penalty applies to the biased logit. Tokens that
tie with the last one that top-k or top-p keeps are kept. Equal scores: greedy takes the lowest id. Log probabilities
are those of the model's raw logits, in nats.

A row whose logits are not numbers (any is NaN, or the largest is infinite, as when every token is masked) gets
`NO_TOKEN`. Any device; float32 and float64 are computed in their own precision, other dtypes in float32. One transfer
brings the results to the host; on CUDA nothing else waits for the device. Called on the engine's thread; `logits` is
only read.

Sources: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); repetition penalty
(Keskar et al. 2019, CTRL); nucleus sampling (Holtzman et al. 2019); min-p (Nguyen et al. 2024, "Turning up the heat").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.sampling import MAX_TOP_LOGPROBS, SamplingParameters
from headrace_predictor.engine.interface import Logprobs
from headrace_predictor.engine.sampling.rules import add_biases, add_rule_biases, apply_rules, mask, places
from headrace_predictor.engine.sampling.vocabulary import (
    IS_COMPILED,
    argmax,
    invert,
    largest,
    maximum,
    ordered,
    softmax,
)
from headrace_predictor.engine.state.cache import on_device
from headrace_predictor.engine.state.sequence import SamplingRow

NO_TOKEN = -1
# Part of a model's fingerprint; raise it with any change after which the same logits and seed may give another token,
# or the same file in a format of integers other logits.
SAMPLER_VERSION = 4 if IS_COMPILED else 3  # torch's softmax rounds otherwise than the kernel.

# The numbers of candidates that a CPU tries before it sorts the whole vocabulary. Fixed, so that a row takes the same
# path, with the same rounding, in every batch.
_CANDIDATES = (128, 1024, 4096)
_MASK = (1 << 64) - 1
_TAKES_LIKELIEST = attrgetter("takes_likeliest")


@dataclass(frozen=True)
class Sampled:
    """Token ids and log probabilities, one for each row; log probabilities only where a row asks for them."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of seed and output position."""
    state = _mix((seed & _MASK) ^ _mix(position + 1))
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: tuple[list[int], Tensor] | None = None) -> Sampled:
    """Chooses a token for each row of `logits` [rows, vocabulary].

    `masks`: of the rows in the list, the tokens that they must not have, [its length, vocabulary] bool.
    """
    raw = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if not raw.is_cuda and all(map(_TAKES_LIKELIEST, rows)):
        return _largest(raw.numpy())
    scores = mask(_penalise(add_rule_biases(add_biases(raw, rows), rows), rows), rows)
    scores = apply_rules(_mask_early_end(_mask_forbidden(scores, masks), rows), rows)
    is_plain = scores is raw and all(row.sampling.is_greedy and not row.sampling.logprobs for row in rows)
    if is_plain and not raw.is_cuda:
        return _largest(raw.numpy())
    parameters = [row.sampling for row in rows]
    token_ids = choose_each(scores, parameters, [len(row.output_ids) for row in rows])
    if scores is not raw:
        token_ids = token_ids.where(maximum(raw).isfinite(), NO_TOKEN)
    if any(row.sampling.logprobs for row in rows):
        return _with_logprobs(raw, token_ids, rows)
    return Sampled(token_ids.tolist(), [None] * len(rows))


def choose_each(logits: Tensor, parameters: Sequence[SamplingParameters], positions: Sequence[int]) -> Tensor:
    """Token ids [rows] on the device for rows at these output positions, by temperature, seed and filters.

    On CUDA nothing waits for the device.
    """
    scores, token_ids, highest = _likeliest(logits)
    drawn = [i for i, one in enumerate(parameters) if not one.is_greedy]
    if drawn:
        index = on_device(drawn, np.int64, scores.device)
        numbers = [uniform(parameters[i].seed or 0, positions[i]) for i in drawn]
        token_ids[index] = _draw(_at(scores, index), highest[index], [parameters[i] for i in drawn], numbers)
    return token_ids.where(highest.isfinite()[:, 0], NO_TOKEN)


def choose(logits: Tensor, temperatures: Tensor | None = None, numbers: Tensor | None = None) -> Tensor:
    """As `choose_each` without filters, from tensors [rows]; a temperature of 0 takes the likeliest, as none do."""
    scores, token_ids, highest = _likeliest(logits)
    if temperatures is not None and numbers is not None:
        divisors = temperatures.where(temperatures > 0, 1.0)[:, None].to(scores.dtype)
        drawn = invert(softmax(scores, highest, divisors), numbers)
        token_ids = drawn.where(temperatures > 0, token_ids)
    return token_ids.where(highest.isfinite()[:, 0], NO_TOKEN)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits in a precision to compute with, and each row's likeliest token [rows] and its logit [rows, 1]."""
    scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    token_ids = argmax(scores)
    return scores, token_ids, scores.gather(1, token_ids[:, None])


def _largest(logits: NDArray[Any]) -> Sampled:
    """The tokens of the largest logits: the usual case, in few operations."""
    token_ids = logits.argmax(-1)
    highest = logits[np.arange(len(logits)), token_ids]
    return Sampled(np.where(np.isfinite(highest), token_ids, NO_TOKEN).tolist(), [None] * len(logits))


def _mix(value: int) -> int:
    """The finaliser of splitmix64 after one increment."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _penalise(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores after repetition, presence and frequency penalties; the same tensor if no row has any."""
    repeating = [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    counting = [i for i, row in enumerate(rows) if row.sampling.presence_penalty or row.sampling.frequency_penalty]
    if not repeating and not counting:
        return scores
    scores = scores.clone()

    def column(values: list[float], lengths: list[int]) -> Tensor:
        return on_device(np.repeat(values, lengths), np.float64, scores.device).to(scores.dtype)

    # A token that occurs twice is written twice, with the same value.
    if repeating:
        seen = [
            np.concatenate([_ids(rows[i].start_ids or rows[i].input_ids), _ids(rows[i].output_ids)]) for i in repeating
        ]
        at, lengths = places(repeating, seen, scores.device)
        penalty = column([rows[i].sampling.repetition_penalty for i in repeating], lengths)
        before = scores[at]
        scores[at] = torch.where(before > 0, before / penalty, before * penalty)
    if counting:
        at, lengths = places(counting, [_ids(rows[i].output_ids) for i in counting], scores.device)
        counts = torch.zeros_like(scores).index_put_(at, scores.new_ones(()), accumulate=True)[at]
        presence = column([rows[i].sampling.presence_penalty for i in counting], lengths)
        frequency = column([rows[i].sampling.frequency_penalty for i in counting], lengths)
        scores[at] = scores[at] - (presence + frequency * counts)
    return scores


def _ids(ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    return np.asarray(ids, dtype=np.int64)


def _mask_forbidden(scores: Tensor, masks: tuple[list[int], Tensor] | None) -> Tensor:
    """Masks the tokens that rows must not have; the same tensor if there are no such rows."""
    if masks is None:
        return scores
    rows, forbidden = masks
    if not scores.is_cuda:
        # By numpy, as in vocabulary.py: torch's threads wait for each other where other processes have the cores.
        masked = scores.numpy().copy()
        masked[rows] = np.where(forbidden.numpy(), -np.inf, masked[rows])
        return torch.from_numpy(masked)
    index = on_device(rows, np.int64, scores.device)
    both = scores[index].masked_fill_(on_device(forbidden.numpy(), np.bool_, scores.device), -torch.inf)
    return scores.index_copy(0, index, both)


def _mask_early_end(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Masks the end tokens of rows below their minimum length; the same tensor if there are none."""
    masked = [
        (i, token_id)
        for i, row in enumerate(rows)
        if not row.sampling.may_end(len(row.output_ids))
        for token_id in row.sampling.end_ids(row.end_ids)
    ]
    if not masked:
        return scores
    at = on_device(masked, np.int64, scores.device)
    return scores.index_put((at[:, 0], at[:, 1]), scores.new_full((), -torch.inf))


def _draw(
    scores: Tensor, highest: Tensor, parameters: Sequence[SamplingParameters], uniforms: Sequence[float]
) -> Tensor:
    """Samples ids by each row's temperature, filters and uniform number; `highest` [rows, 1] is the largest score."""
    probabilities = softmax(scores, highest, _column([s.temperature for s in parameters], scores))
    numbers = on_device(uniforms, np.float64, scores.device)
    filtered = [i for i, s in enumerate(parameters) if s.is_filtered]
    if not filtered:
        return invert(probabilities, numbers)
    index = on_device(filtered, np.int64, scores.device)
    chosen = _draw_filtered(
        _at(scores, index), _at(probabilities, index), numbers[index], [parameters[i] for i in filtered]
    )
    if len(filtered) == len(parameters):
        return chosen
    return invert(probabilities, numbers).index_copy_(0, index, chosen)


def _draw_filtered(
    scores: Tensor, probabilities: Tensor, numbers: Tensor, parameters: Sequence[SamplingParameters]
) -> Tensor:
    """Samples ids from the tokens that top-k, top-p and min-p keep.

    Tries a few candidates of each row, then more if they do not decide, and finally sorts all.
    """
    rows, size = scores.shape
    chosen = torch.zeros(rows, dtype=torch.long, device=scores.device)
    # Checking whether the candidates decide would make a GPU wait, and a GPU sorts fast.
    tiers = () if scores.is_cuda else tuple(count for count in _CANDIDATES if count < size)
    undecided = list(range(rows))
    for count in tiers:
        index = on_device(undecided, np.int64, scores.device)
        values, ids = largest(_at(scores, index), count)
        weights = _at(probabilities, index).gather(1, ids)
        inside = _inside(values, weights, [parameters[i] for i in undecided], size)
        ids, order = ids.sort(-1)
        at = invert(weights.where(inside, 0.0).gather(1, order), numbers[index])
        chosen[index] = ids.gather(1, at[:, None])[:, 0]
        # If the last candidate is kept, one beyond it might be too.
        undecided = [i for i, last in zip(undecided, inside[:, -1].tolist(), strict=True) if last]
        if not undecided:
            return chosen
    index = on_device(undecided, np.int64, scores.device)
    scores, probabilities = _at(scores, index), _at(probabilities, index)
    values = ordered(scores)
    inside = _inside(values, ordered(probabilities), [parameters[i] for i in undecided], size)
    limit = values.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    chosen[index] = invert(probabilities.where(scores >= limit, 0.0), numbers[index])
    return chosen


def _inside(values: Tensor, weights: Tensor, parameters: Sequence[SamplingParameters], size: int) -> Tensor:
    """Which candidates top-k, top-p and min-p keep; all of a row if more candidates are needed to decide.

    `values` are in descending order, `weights` their probabilities.
    """
    count = values.shape[1]
    ranks = [min(s.top_k, size) if s.top_k > 0 else size for s in parameters]
    kth = on_device(ranks, np.int64, values.device)[:, None]
    # The limit is a value and not a rank, so that ties are kept; tokens without weight are never chosen.
    inside = ((values >= values.gather(1, kth.clamp(max=count) - 1)) | (kth > count)) & (weights > 0)
    open_ended = inside[:, -1:] & (kth < size)
    cumulative = weights.where(inside, 0.0).double().cumsum(-1)
    # Without top-k the mass is that of the whole vocabulary.
    mass = cumulative[:, -1:].where(kth < size, 1.0)
    top_p = _column([s.top_p for s in parameters], cumulative)
    nucleus = ((cumulative - weights < top_p * mass) & inside).sum(-1, keepdim=True).clamp(min=1)
    inside &= (values >= values.gather(1, nucleus - 1)) | (top_p == 1)
    if any(s.min_p > 0 for s in parameters):
        inside &= weights >= weights[:, :1] * _column([s.min_p for s in parameters], weights)
    return inside | open_ended if count < size else inside


def _at(values: Tensor, index: Tensor) -> Tensor:
    """The rows at `index`, in ascending order; not a copy if that is all of them."""
    return values if len(index) == len(values) else values[index]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return on_device(values, np.float64, like.device).to(like.dtype)[:, None]


def _with_logprobs(raw: Tensor, token_ids: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """The ids with the log probabilities that rows ask for."""
    scored = [i for i, row in enumerate(rows) if row.sampling.logprobs]
    index = on_device(scored, np.int64, raw.device)
    logprobs = raw[index].log_softmax(-1)
    # The same number for every row, because it can change the order of equal ones.
    count = min(MAX_TOP_LOGPROBS, raw.shape[1]) if any(row.sampling.top_logprobs for row in rows) else 0
    values, ids = largest(logprobs, count) if count else (logprobs[:, :0], index.new_empty(len(scored), 0))
    chosen = logprobs.gather(1, token_ids[index, None].clamp(min=0))
    # Float64 represents ids and float32 exactly: everything is one transfer.
    packed = torch.cat([column.double().flatten() for column in (token_ids, chosen, ids, values)]).tolist()
    after_ids = len(rows) + len(scored)
    after_top = after_ids + len(scored) * count
    results: list[Logprobs | None] = [None] * len(rows)
    for n, i in enumerate(scored):
        at = slice(n * count, (n + 1) * count)
        pairs = zip(map(int, packed[after_ids:after_top][at]), packed[after_top:][at], strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: rows[i].sampling.top_logprobs]
        results[i] = Logprobs(packed[len(rows) + n], top)
    return Sampled([int(token_id) for token_id in packed[: len(rows)]], results)
