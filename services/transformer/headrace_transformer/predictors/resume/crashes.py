"""Requests under which predictors crash: how often a request is retried, when in isolation, and when it is refused.

One crash does not prove that the request caused it: a machine may have failed, or a request beside it. So only
consecutive crashes are counted, without a new token between them. After `limit` of them the next call runs in
isolation: its replica computes nothing else. A crash in isolation is caused by the request, which then is quarantined:
refused for ten minutes from any caller. A crash before isolation has begun does not prove anything, but a request to
which that happens again and again is quarantined too: it may crash its predictor before its first step.

A request can end the engine that computes it, and its predictor reports that. A predictor that is lost as a whole was
most likely killed, replaced or cut off, so that is half a crash. Pure.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from headrace.errors import HeadraceError, HopBrokenError
from headrace.sampling import SamplingParameters

_MOST_BEFORE_ISOLATION = 4
_HALVES = 2  # Of a crash; the loss of a predictor is one.
_QUARANTINE_S = 600.0
_CAPACITY = 1024


class NextCall(Enum):
    """How the next call of a request may be made."""

    SHARED = "beside others"
    ISOLATED = "in isolation on its replica"
    NONE = "not at all"


class PredictorLostError(HopBrokenError):
    """The connection to a predictor broke, or the predictor fell silent."""


class CrashCount:
    """The crashes of one request; `limit` of them in a row, and it runs in isolation."""

    def __init__(self, limit: int) -> None:
        self._limit = _HALVES * limit
        self._in_a_row = 0  # In halves, like all counts here.
        self._in_isolation = 0
        self._is_isolated = False

    def isolated(self) -> None:
        """From now on the call's predictor computes nothing else."""
        self._is_isolated = True

    def call_ended(self, error: HeadraceError) -> None:
        """The call ended without a new token: HopBrokenError is a crash."""
        halves = 1 if isinstance(error, PredictorLostError) else _HALVES if isinstance(error, HopBrokenError) else 0
        self._in_a_row += halves
        if self._is_isolated:
            self._in_isolation += halves
        self._is_isolated = False

    def token(self) -> None:
        """A new token came: the request did not cause the crashes before it."""
        self._in_a_row = self._in_isolation = 0
        self._is_isolated = False

    @property
    def next_call(self) -> NextCall:
        if self._in_a_row < self._limit:
            return NextCall.SHARED
        is_cause = self._in_isolation >= _HALVES
        if is_cause or self._in_a_row > self._limit + _HALVES * _MOST_BEFORE_ISOLATION:
            return NextCall.NONE
        return NextCall.ISOLATED


def request_fingerprint(model: str, prompt_ids: Sequence[int], sampling: SamplingParameters) -> bytes:
    """SHA-256 of what makes two requests the same: model, prompt ids and sampling parameters, without the seed, which
    is drawn anew where the caller gives none."""
    head = f"{model}\n{sampling.model_dump_json(exclude={'seed'})}\n"
    return hashlib.sha256(head.encode() + np.array(prompt_ids, dtype=np.int64).tobytes()).digest()


class Quarantine:
    """Fingerprints of requests that are refused for ten minutes; the oldest of too many is forgotten.

    Owned by the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()  # The oldest first.

    def __bool__(self) -> bool:
        """Whether anything is refused; if not, no fingerprint has to be computed."""
        return bool(self._until)

    def add(self, fingerprint: bytes) -> None:
        """Refuses a fingerprint from now on."""
        self._until.pop(fingerprint, None)
        self._until[fingerprint] = self._clock() + _QUARANTINE_S
        if len(self._until) > _CAPACITY:
            self._until.popitem(last=False)

    def refuses(self, fingerprint: bytes) -> bool:
        """Whether a fingerprint is refused now."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return fingerprint in self._until
