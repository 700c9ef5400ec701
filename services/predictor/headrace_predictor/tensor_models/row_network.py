"""A model that computes one vector for each row of token ids.

`run` blocks; only one thread calls it. Rows are padded to one batch if that does not change results: `prove` compares
short rows alone with the same rows padded. If they differ (the model uses padding as input, or has no padding token),
every row runs alone. So do rows of different stages, where positions are scaled by the longest one of a batch
(`Scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.oip.model_description import INPUT_IDS
from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.tensor_models.rows import ATTENTION_MASK, Rows, pad

Vectors = NDArray[np.float32]
Compute = Callable[[dict[str, Tensor]], Tensor]  # From a batch's inputs (see rows.py) to vectors [rows, size].

_LENGTHS = (2, 3, 6, 11)  # One row could come out right by chance.
# Rounding depends on the batch's shape; a real effect of padding is far larger.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


class RowNetwork:
    """See the module. `pad_id` is the model's own padding id; with `alone` no rows are padded."""

    def __init__(
        self,
        compute: Compute,
        pad_id: int,
        device: torch.device,
        dtype: torch.dtype,
        alone: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        self.pads_rows = not alone
        self._scaling = scaling
        self._compute = compute
        self._pad_id = pad_id
        self._device = device
        self._dtype = dtype

    def run(self, requests: Sequence[Rows]) -> list[Vectors]:
        """Returns the vectors [rows, size] of each request."""
        if not self.pads_rows or self._differ_in_stage(requests):
            return [np.concatenate([self._forward(row) for row in _single_rows(rows)]) for rows in requests]
        vectors = self._forward(pad(requests, self._pad_id))
        ends = np.cumsum([len(rows[INPUT_IDS]) for rows in requests])
        return np.split(vectors, ends[:-1])

    def prove(self, vocabulary_size: int, max_length: int, end_id: int | None = None) -> int:
        """Decides whether rows can be padded, each ending in `end_id`; returns the size of a vector."""
        ids = np.array([i for i in range(_LENGTHS[-1] + 2) if i not in (self._pad_id, end_id)], dtype=np.int64)
        rows = [np.roll(ids, length)[: min(length, max_length)] % vocabulary_size for length in _LENGTHS]
        for row in rows:
            row[-1] = row[-1] if end_id is None else end_id
        plain = [_plain(row) for row in rows]
        alone = np.concatenate([self._forward(row) for row in plain[:-1]])
        if self.pads_rows:
            tolerance = _TOLERANCES.get(self._dtype, _LOW_PRECISION_TOLERANCE)
            try:
                padded = self._forward(pad(plain, self._pad_id))[:-1]
                self.pads_rows = bool(np.abs(padded - alone).max() <= tolerance * max(1.0, np.abs(alone).max()))
            except (ValueError, IndexError, RuntimeError):
                self.pads_rows = False
        return int(alone.shape[1])

    def _differ_in_stage(self, requests: Sequence[Rows]) -> bool:
        if self._scaling is None:
            return False
        lengths = {length for rows in requests for length in (rows[INPUT_IDS].shape[1], *_lengths(rows))}
        return len(set(map(self._scaling.stage, lengths))) > 1

    @torch.inference_mode()
    def _forward(self, rows: Rows) -> Vectors:
        tensors = {name: torch.from_numpy(ids).to(self._device) for name, ids in rows.items()}
        vectors: Vectors = self._compute(tensors).float().cpu().numpy()
        return vectors


def _lengths(rows: Rows) -> list[int]:
    """Of each row, up to its last token that is not masked."""
    mask = rows[ATTENTION_MASK]
    lengths: list[int] = (mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)).tolist()
    return lengths


def _single_rows(rows: Rows) -> list[Rows]:
    return [{name: ids[i : i + 1, :end].copy() for name, ids in rows.items()} for i, end in enumerate(_lengths(rows))]


def _plain(ids: NDArray[np.int64]) -> Rows:
    row = ids[None].copy()
    return {INPUT_IDS: row, ATTENTION_MASK: np.ones_like(row)}
