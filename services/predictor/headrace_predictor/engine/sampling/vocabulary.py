"""Probabilities of a vocabulary and searches along it, faster on a CPU than torch's own operations; scores of prompts.

numpy's argmax and sort use vectors: for 32 rows of 32,000 tokens argmax takes 0.07 ms instead of 0.8. The others first
reduce blocks, and then search only a few of them. Pure; every function takes a tensor [rows, vocabulary] and computes
each row separately, with rounding that does not depend on the number of rows. Rows with NaN give some id within the
vocabulary.
"""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.oip.prompt_scores import PromptLogprobs
from headrace.sampling import MAX_TOP_LOGPROBS
from headrace_predictor.engine.cpu.threads import kernel_threads
from headrace_predictor.engine.state.sequence import Row

try:
    from headrace_predictor.engine.cpu import probabilities
    from headrace_predictor.engine.cpu.compiled import run_in_parallel
except ImportError:  # Numba is optional.
    probabilities = None  # type: ignore[assignment]

IS_COMPILED = probabilities is not None
_LANES = 16
_BLOCK = 128  # Adjacent tokens, for invert.
_GROUP = 16  # Maximum of tokens, for largest: spread over the vocabulary, because a CPU reduces that layout fastest.


def argmax(values: Tensor) -> Tensor:
    """The id of each row's largest value, the lowest of equal ones; the id of a NaN if there is any."""
    return values.argmax(-1) if values.is_cuda else torch.from_numpy(values.numpy().argmax(-1))


def maximum(values: Tensor) -> Tensor:
    """Each row's largest value; NaN if there is any."""
    return values.amax(-1) if values.is_cuda else torch.from_numpy(values.numpy().max(-1))


def softmax(values: Tensor, highest: Tensor, divisors: Tensor) -> Tensor:
    """The softmax of rows divided by `divisors` [rows, 1]; `highest` [rows, 1] is each row's largest value."""
    if not _is_compiled(values):
        # Subtract first: a small divisor would magnify the rounding errors of large values.
        return (values - highest).div_(divisors).softmax(-1)
    rows, size = values.shape
    out = torch.empty(rows, -(-size // _LANES) * _LANES)
    _run(probabilities.softmax, values, highest[:, 0].numpy(), divisors[:, 0].numpy(), out.numpy())
    return out[:, :size]


def _is_compiled(values: Tensor) -> bool:
    return IS_COMPILED and not values.is_cuda and values.dtype == torch.float32


def _run(kernel: Any, values: Tensor, *arguments: Any) -> None:
    """Runs a kernel of probabilities.py on rows of values."""
    values = values if values.stride(-1) == 1 else values.contiguous()
    rows, size = values.shape
    place = values.data_ptr(), values.stride(0), size
    run_in_parallel(kernel, kernel_threads(), *place, *arguments, alone=rows == 1)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The ids at which the cumulative sums of `weights` reach `numbers` [rows], in [0, 1) of each row's total.

    Sums are float64 and in the order of ids. A weight of zero is never chosen.
    """
    if _is_compiled(weights):
        sums = torch.empty(len(weights), weights.shape[1] // _BLOCK + 1, dtype=torch.float64)
        _run(probabilities.sum_blocks, weights, _BLOCK, sums.numpy())
    else:
        blocks, rest = _blocks(weights)
        sums = torch.cat([blocks.sum(-1, dtype=torch.float64), rest.double().sum(-1, keepdim=True)], -1)
    cumulative = sums.cumsum(-1)
    target = numbers[:, None] * cumulative[:, -1:]
    block = _reaching(cumulative, target)
    before = torch.cat([torch.zeros_like(target), cumulative], -1).gather(1, block)
    ids = _ids_of(block)
    last = weights.shape[1] - 1
    inside = weights.gather(1, ids.clamp(max=last)).double().masked_fill(ids > last, 0.0).cumsum(-1)
    return ids.gather(1, _reaching(inside, target - before))[:, 0].clamp(max=last)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row in descending order, and their ids; any of equal ones."""
    size = values.shape[1]
    # Enough groups that most of them can be skipped.
    group = min(_GROUP, size // (8 * count))
    if values.is_cuda or group < 2:
        return values.topk(count)
    groups = size // group
    # Every value among the `count` largest lies in a group whose maximum is among the `count` largest maxima.
    spread = values[:, : groups * group].view(-1, group, groups)
    chosen = spread.amax(1).topk(count, sorted=False).indices
    members = torch.arange(0, groups * group, groups, device=values.device)
    ids = (chosen[:, :, None] + members).flatten(1)
    rest = torch.arange(groups * group, size, device=values.device).expand(len(values), -1)
    ids = torch.cat([ids, rest], -1)
    top, at = values.gather(1, ids).topk(count)
    return top, ids.gather(1, at)


def ordered(values: Tensor) -> Tensor:
    """Each row's values in descending order."""
    if values.is_cuda:
        return values.sort(-1, descending=True).values
    # numpy's sort takes a quarter of the time of torch's, which also returns the indices.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks [rows, blocks, tokens], and the rest."""
    blocks = values.shape[1] // _BLOCK
    whole = blocks * _BLOCK
    return values[:, :whole].view(len(values), blocks, _BLOCK), values[:, whole:]


def _ids_of(block: Tensor) -> Tensor:
    """Ids [rows, tokens] in one block [rows, 1] each; in the last block they may exceed the vocabulary."""
    return block * _BLOCK + torch.arange(_BLOCK, device=block.device)


def _reaching(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose sum is above the target, but at most the last index with a weight."""
    chosen = torch.searchsorted(cumulative, target, right=True)
    # Rounding can make the target equal to the total, beyond every token with a weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    return torch.minimum(chosen, last).clamp(max=cumulative.shape[1] - 1)


def score(logits: Tensor, rows: Rows[Row]) -> list[PromptLogprobs]:
    """The log probabilities of each row's positions to score; `logits` [positions of all rows, vocabulary]."""
    raw = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = raw.log_softmax(-1)
    following = [row.sequence.ids[position + 1] for row in rows for position in row.scores]
    chosen = logprobs.gather(1, torch.tensor(following, device=logits.device)[:, None])[:, 0].float().cpu().numpy()
    tops = [row.sequence.prompt_logprobs or 0 for row in rows]
    # The same number for every row, because it can change the order of equal ones.
    count = min(MAX_TOP_LOGPROBS, raw.shape[1]) if any(tops) else 0
    found, found_ids = largest(logprobs, count) if count else (logprobs[:, :0], logprobs[:, :0])
    values, ids = found.float().cpu().numpy(), found_ids.cpu().numpy().astype(np.int32)
    order = np.lexsort((ids, -values), axis=-1)
    values, ids = np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
    scored = []
    at = 0
    for row, top in zip(rows, tops, strict=True):
        part = slice(at, at := at + len(row.scores))
        scored.append(PromptLogprobs(chosen[part], ids[part, :top], values[part, :top]))
    return scored
