"""The progress of a generation over all its calls: what a call's end means for it, and the next call's submission.

The pipeline writes a submission (steps.proto) once, and each call copies it.

One crash of a predictor does not prove that the request caused it: a machine may have failed, or a request beside it.
So only consecutive crashes are counted, without a new token between them. After `limit` of them the next call runs in
isolation: its replica computes nothing else. A crash in isolation is caused by the request, which then is quarantined:
refused for ten minutes from any caller. A crash before isolation has begun does not prove anything, but a request to
which that happens again and again is quarantined too: it may crash its predictor before its first step.

A request can end the engine that computes it, and its predictor reports that. A predictor that is lost as a whole was
most likely killed, replaced or cut off, so that is half a crash. No I/O.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from headrace.errors import (
    DrainingError,
    HeadraceError,
    HopBrokenError,
    NotReadyError,
    OtherWeightsError,
    OverloadedError,
)
from headrace.oip.prompt_scores import PROMPT_LOGPROBS
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import RESTRICTIONS, SamplingParameters
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors import TokenChunk

logger = logging.getLogger(__name__)

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


def request_fingerprint(submission: pb.Submission, sampling: SamplingParameters) -> bytes:
    """SHA-256 of what makes two requests the same: model, prompt ids and sampling parameters, without the seed, which
    is drawn anew where the caller gives none."""
    head = f"{submission.model}\n{sampling.model_dump_json(exclude={'seed'})}\n"
    return hashlib.sha256(head.encode() + np.array(submission.prompt_ids, dtype=np.int64).tobytes()).digest()


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


@dataclass(eq=False)
class Progress:
    """See the module; of one generation. `resumes`: a call can resume after the ids of an earlier one."""

    request_id: str
    resumes: bool
    crashes: CrashCount
    # Of the weights that have given the ids so far, or that must give them; "" for any, or if none is reported.
    fingerprint: str
    output_ids: list[int]
    isolates: bool  # A call can run in isolation.
    was_moved: bool = False  # A predictor lost it, handed it back or was about to stop.
    _answering: str = ""  # The weights that answer the latest call.
    _cached_tokens: int | None = None
    _engine_s: float = 0.0  # Of the latest call, and of those before it.
    _earlier_engine_s: float = 0.0
    _span: ClientSpan | None = None  # The latest call's.
    _follows: str = ""

    def check_weights(self, fingerprint: str) -> None:
        """Notes which weights answer a call; raises OtherWeightsError where these cannot resume the answer."""
        if self.fingerprint and fingerprint != self.fingerprint:
            raise OtherWeightsError("a predictor would have resumed the answer with other weights", hop="predictor")
        self._answering = fingerprint

    def take(self, chunk: TokenChunk) -> None:
        """Adds a chunk, which gets what the first call found in a cache, and what engines have worked in all calls."""
        if not self.output_ids:
            self.fingerprint = self._answering
        self.output_ids += chunk.token_ids
        self.crashes.token()
        if self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        chunk.cached_tokens = self._cached_tokens
        if chunk.engine_s is not None:
            self._engine_s = chunk.engine_s
            chunk.engine_s += self._earlier_engine_s
        if chunk.usage is not None and self._cached_tokens is not None:
            chunk.usage.cached_tokens = self._cached_tokens

    def next_span(self) -> ClientSpan:
        """The next call's, which links to that of the newest predictor that answered, or else to the first call's."""
        if self._span is not None:
            self._follows = self._span.answered_by or self._follows or self._span.traceparent
        self._span = ClientSpan(self._follows)
        return self._span

    def ended(self, error: HeadraceError) -> None:
        """Records the error that ended a call; raises it if it ends the request too."""
        self._earlier_engine_s += self._engine_s
        self._engine_s = 0.0
        if self.output_ids and not self.resumes:
            raise error
        if isinstance(error, OverloadedError) and not (self.output_ids or self.was_moved):
            raise error
        self.crashes.call_ended(error)
        if not self.isolates and self.crashes.next_call is not NextCall.SHARED:
            raise error  # It cannot run in isolation, so the cause of the crashes cannot be found.
        if isinstance(error, (HopBrokenError, DrainingError)):
            self.moves(error)

    def moves(self, error: HeadraceError) -> None:
        """Records that another call continues the answer because of `error`."""
        self.was_moved = True
        moved = (self.request_id, len(self.output_ids), error.message)
        logger.info("request %s is moved after %d tokens: %s", *moved)

    def last_word(self, error: HeadraceError) -> HeadraceError:
        """The error of the request if no predictor takes it in time."""
        if isinstance(error, OtherWeightsError):
            return HopBrokenError(
                "the model's weights have changed, and no predictor has the old ones", hop="predictor"
            )
        if self.output_ids:
            return HopBrokenError("the predictor was lost, and no other one resumed the answer", hop="predictor")
        if isinstance(error, HopBrokenError):
            return NotReadyError("no predictor answers", hop="predictor")
        return error


def sampling_json(sampling: SamplingParameters) -> bytes:
    """The parameters as a submission has them; without what changes nothing and an earlier release would refuse."""
    unused = {name for name in ("pace", "structured_outputs", *RESTRICTIONS) if not getattr(sampling, name)}
    return sampling.model_dump_json(exclude_none=True, exclude=unused).encode()


def next_submission(
    submission: pb.Submission, progress: Progress, span: ClientSpan, is_isolated: bool, timeout_s: float | None
) -> pb.Submission:
    """The next call's, which continues after the tokens so far; its link sets the number.

    `timeout_s`: what is left of the deadline. The log probabilities of the prompt are asked for once only.
    """
    own = pb.Submission(
        output_ids=progress.output_ids,
        timeout_s=timeout_s,
        alone=is_isolated,
        fingerprint=progress.fingerprint,
        traceparent=span.traceparent,
        follows=span.follows,
        moved=bool(progress.output_ids),
    )
    own.MergeFrom(submission)
    if progress.output_ids:  # A call that continues after earlier ids follows one whose first chunk had them.
        own.ClearField(PROMPT_LOGPROBS)
    return own
