"""The log probabilities of a prompt's tokens, from the logits of a step.

A request for them computes every position of its prompt, none from a cached block, and the model's head at each. The
scheduler limits their number in a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from headrace.oip.prompt_logprobs import PromptLogprobs
from headrace.sampling import MAX_TOP_LOGPROBS
from headrace_predictor.engine.sampling.vocabulary import largest
from headrace_predictor.engine.state.sequence import Row


def score(logits: Tensor, rows: Rows[Row]) -> list[PromptLogprobs]:
    """The log probabilities of each row's positions to score; `logits` [positions of all rows, vocabulary]."""
    raw = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = raw.log_softmax(-1)
    following = [row.sequence.ids[position + 1] for row in rows for position in row.scores]
    chosen = logprobs.gather(1, torch.tensor(following, device=logits.device)[:, None])[:, 0].float().cpu().numpy()
    tops = [row.sequence.request.prompt_logprobs or 0 for row in rows]
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
