"""A request as the engine sees it while it lives."""

from __future__ import annotations

import time
from typing import Any

from services.predictor.engine.interface import GenerationRequest, Usage
from services.predictor.engine.sampler import SamplingRow
from services.predictor.engine.slot import MergingSlot


class Sequence:
    """Ids so far, the slot they go to, and what the runner keeps for it. Owned by the engine thread."""

    def __init__(self, request: GenerationRequest, slot: MergingSlot, end_ids: frozenset[int]) -> None:
        self.request = request
        self.slot = slot
        self.output_ids = list(request.output_ids)
        self.end_ids = end_ids
        self.cache: Any = None
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None

    @property
    def row(self) -> SamplingRow:
        return SamplingRow(self.request.sampling, self.request.input_ids, self.output_ids, self.end_ids)

    @property
    def reserved_tokens(self) -> int:
        """Tokens whose keys and values it may come to hold."""
        return len(self.request.input_ids) + (self.request.sampling.max_tokens or 0)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.input_ids), 0, len(self.output_ids))

    def expired(self, now: float) -> bool:
        return self.request.deadline is not None and now >= self.request.deadline

    def append(self, token_id: int) -> str | None:
        """Takes the next token; the reason if the sequence ends with it."""
        self.output_ids.append(token_id)
        sampling = self.request.sampling
        if token_id in self.end_ids and not sampling.ignore_eos and len(self.output_ids) >= sampling.min_tokens:
            return "stop"
        return "length" if len(self.output_ids) >= (sampling.max_tokens or 0) else None
