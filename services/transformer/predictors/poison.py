"""Requests that have ended predictors by themselves, kept to be refused for a while.

A request is known by its fingerprint: the model, the prompt's ids and the sampling parameters but for the seed, which
is drawn anew where the caller gives none. Bounded: the oldest of too many is forgotten. Owned by the event loop.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from millrace.sampling import SamplingParameters

_REFUSED_S = 600.0
_CAPACITY = 1024


def fingerprint(model: str, prompt_ids: Sequence[int], sampling: SamplingParameters) -> bytes:
    """SHA-256 of what makes two requests the same."""
    head = f"{model}\n{sampling.model_dump_json(exclude={'seed'})}\n"
    return hashlib.sha256(head.encode() + np.array(prompt_ids, dtype=np.int64).tobytes()).digest()


class Poison:
    """Fingerprints with the time until which each is refused, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anything is refused; if not, no fingerprint has to be computed."""
        return bool(self._until)

    def add(self, known: bytes) -> None:
        """Refuses a fingerprint from now on for ten minutes."""
        self._until.pop(known, None)
        self._until[known] = self._clock() + _REFUSED_S
        if len(self._until) > _CAPACITY:
            self._until.popitem(last=False)

    def refuses(self, known: bytes) -> bool:
        """Whether a fingerprint is refused now."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return known in self._until
