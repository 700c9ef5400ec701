"""The progress of a generation over all its calls, the effect of a call's end on it, and the next call's submission.

The pipeline writes a submission (steps.proto) once, and each call copies it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
from headrace_transformer.predictors.resume.crashes import CrashCount, NextCall
from headrace_transformer.predictors.tokens import TokenChunk

logger = logging.getLogger(__name__)


class Progress:
    """See the module; of one generation. `resumes`: a call can resume after the ids of an earlier one."""

    def __init__(
        self,
        request_id: str,
        resumes: bool,
        crashes: CrashCount,
        fingerprint: str = "",
        output_ids: Sequence[int] = (),
    ) -> None:
        self._request_id = request_id
        self._resumes = resumes
        self.isolates = resumes  # A call can run in isolation.
        self.crashes = crashes
        self.output_ids = list(output_ids)
        # Of the weights that have given the ids so far, or that must give them; "" for any, or if none is reported.
        self.fingerprint = fingerprint
        self._answering = ""  # Of those that answer the latest call.
        self._cached_tokens: int | None = None
        self._engine_s = 0.0  # Of the latest call, and of those before it.
        self._earlier_engine_s = 0.0
        self.was_moved = False  # A predictor lost it, handed it back or was about to stop.
        self._span: ClientSpan | None = None  # The latest call's.
        self._follows = ""

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
        if self.output_ids and not self._resumes:
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
        moved = (self._request_id, len(self.output_ids), error.message)
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
