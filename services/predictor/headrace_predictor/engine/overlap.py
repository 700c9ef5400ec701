"""Steps of rows that decode, whose results the host handles while the device computes the next one.

A row's next id is then known on the device alone. The end of a sequence is noticed one step late: what that step
computed of it is dropped; it wrote only to a place of that sequence's own blocks, before any step that may use them.
Each token is that of the engine's plain steps.
"""

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.state.cache import on_device
from headrace_predictor.engine.state.sequence import Row
from headrace_predictor.engine.step import Outcome, Result

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A step that has begun; `read` waits for the device and returns its tokens."""

    rows: list[Row]
    tokens: Tensor
    read: Callable[[], list[int]]


def is_plain(row: Row) -> bool:
    """Whether a row's next token depends on nothing that the host derives from its earlier ones."""
    sequence = row.sequence
    return (
        row.count == 1
        and row.samples
        and not row.scores
        and sequence.sampling.is_plain
        and not sequence.sampling.pace
        and sequence.row.rules is None
        and sequence.constraint is None
        and sequence.adapter is None
        and not sequence.alone
    )


def overlapped(
    runner: PagedRunner, rows: list[Row], follow: Callable[[list[Row]], list[Row]]
) -> Iterator[tuple[list[Row], Outcome]]:
    """Rows and outcome of each step; each begins before the outcome of the one before is read.

    `follow` has the rows of the next step, none where it has to be planned. A step that cannot begin ends them: the
    plain step has the same error, and finds its cause.
    """
    pending = _begin(runner, rows)
    while pending is not None:
        next_rows = follow(pending.rows)
        following = _begin(runner, next_rows, pending) if next_rows else None
        tokens = zip(pending.rows, pending.read(), strict=True)
        yield pending.rows, Outcome([Result(row, token, None) for row, token in tokens if row.sequence.blocks], [])
        pending = following


def _begin(runner: PagedRunner, rows: list[Row], before: _Pending | None = None) -> _Pending | None:
    try:
        tokens = None if before is None else before.tokens
        if before is not None and len(rows) < len(before.rows):
            places = {row.sequence: i for i, row in enumerate(before.rows)}
            kept = on_device([places[row.sequence] for row in rows], np.int64, before.tokens.device)
            tokens = before.tokens.index_select(0, kept)
        chosen = runner.choose(rows, tokens)
        return _Pending(rows, chosen, _reading(chosen))
    except Exception:
        logger.warning("a step did not begin before the last one's end", exc_info=True)
        return None


def _reading(tokens: Tensor) -> Callable[[], list[int]]:
    host = tokens.to("cpu", non_blocking=True, copy=True)  # To pinned memory: nothing waits.
    copied = torch.get_device_module(tokens.device).Event()
    copied.record()
    return lambda: copied.synchronize() or host.tolist()
