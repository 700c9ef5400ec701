"""A model of transformers that computes one vector for each row of token ids.

`run` blocks; only one thread calls it. Rows are padded to one batch if that does not change results: `prove` compares a
short row alone with the same row padded. If they differ (the model uses padding as input, or has no padding token),
every row runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.oip.model_description import INPUT_IDS
from services.predictor.tensor_models.rows import ATTENTION_MASK, Rows, pad

Vectors = NDArray[np.float32]
Head = Callable[[Any, Tensor], Tensor]  # From the model's output and the attention mask to vectors [rows, size].

_SHORT, _LONG = 3, 11
# Rounding depends on the batch's shape; a real effect of padding is far larger.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


class RowNetwork:
    """See the module. `pad_id` is the model's own padding id."""

    def __init__(self, model: Any, head: Head, pad_id: int) -> None:
        self.pads_rows = True
        self._model = model
        self._head = head
        self._pad_id = pad_id

    def run(self, requests: Sequence[Rows]) -> list[Vectors]:
        """Returns the vectors [rows, size] of each request."""
        if not self.pads_rows:
            return [np.concatenate([self._forward(row) for row in _single_rows(rows)]) for rows in requests]
        vectors = self._forward(pad(requests, self._pad_id))
        ends = np.cumsum([len(rows[INPUT_IDS]) for rows in requests])
        return np.split(vectors, ends[:-1])

    def prove(self, vocabulary_size: int, max_length: int) -> None:
        """Decides whether rows can be padded."""
        ids = np.array([i for i in range(_LONG + 1) if i != self._pad_id], dtype=np.int64) % vocabulary_size
        short, long = (_plain(ids[: min(length, max_length)]) for length in (_SHORT, _LONG))
        alone = self._forward(short)
        try:
            padded = self._forward(pad([short, long], self._pad_id))[:1]
        except (ValueError, IndexError, RuntimeError):
            self.pads_rows = False
            return
        tolerance = _TOLERANCES.get(self._model.dtype, _LOW_PRECISION_TOLERANCE)
        self.pads_rows = bool(np.abs(padded - alone).max() <= tolerance * max(1.0, np.abs(alone).max()))

    @torch.inference_mode()
    def _forward(self, rows: Rows) -> Vectors:
        tensors = {name: torch.from_numpy(ids).to(self._model.device) for name, ids in rows.items()}
        output = self._model(**tensors, return_dict=True)
        vectors: Vectors = self._head(output, tensors[ATTENTION_MASK]).float().cpu().numpy()
        return vectors


def _single_rows(rows: Rows) -> list[Rows]:
    return [{name: ids[i : i + 1].copy() for name, ids in rows.items()} for i in range(len(rows[INPUT_IDS]))]


def _plain(ids: NDArray[np.int64]) -> Rows:
    row = ids[None].copy()
    return {INPUT_IDS: row, ATTENTION_MASK: np.ones_like(row)}
