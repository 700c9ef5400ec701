"""One generation made of as many calls as it takes: another predictor resumes it when its predictor crashes.

Contract with the predictor: millrace/oip/resumable.py. The end of a call decides what follows:

- a crash (the connection broke, the engine died, or the predictor became silent): the next call resumes after the ids
  so far; crashes.py decides how often, and when in isolation;
- a predictor that drains: the stream stays there until another one can resume it;
- a predictor that is unreachable, still loads, hands the stream back, or has not answered since the call began (the
  process hangs, which the request has not caused): the next call resumes in the same way, without a limit;
- an overloaded predictor: a new request is refused at once, a resumed one waits;
- any other error is the request's own, and ends it.

An answer comes from one set of weights: once it has begun, only a predictor with the same `fingerprint` resumes it.
Others refuse, and the request waits for the right one, through Envoy, which tries several replicas for each call.

Before the first token a resume is a plain retry; a server that cannot resume after given ids is retried only then.
Between calls the request waits, see retries.py. A request that crashes its predictor in isolation is not retried, and
identical requests are quarantined: so it cannot crash all replicas, and requests beside it continue.

Owned by the event loop; one for all requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from millrace.deadline import Deadline
from millrace.errors import (
    DrainingError,
    HopBrokenError,
    MillraceError,
    NotFoundError,
    NotReadyError,
    OtherWeightsError,
    OverloadedError,
    RequestFailedError,
)
from millrace.oip.resumable import CallOptions
from millrace.rpc.client_interceptors import CallSpan
from services.transformer.predictors.answers import BrokenAnswerError
from services.transformer.predictors.client import Generation, PredictorClient, TokenChunk
from services.transformer.predictors.crashes import CrashCount, NextCall, Quarantine, request_fingerprint
from services.transformer.predictors.first_token import FirstToken
from services.transformer.predictors.retries import Backoff

logger = logging.getLogger(__name__)

_MAX_HEARTBEAT_S = 1.0
_REFUSED = "this request has ended its predictor again and again; it is refused for a while"


class ResumingGenerator:
    """See the module; after `resume_limit` crashes in a row a request runs in isolation.

    `can_resume(model, fingerprint)`: some replica would resume a stream of these weights.
    """

    def __init__(
        self,
        predictor: PredictorClient,
        resume_limit: int = 2,
        can_resume: Callable[[str, str], bool] = lambda model, fingerprint: False,
    ) -> None:
        self._can_resume = can_resume
        self._predictor = predictor
        self._resume_limit = resume_limit
        self._quarantine = Quarantine()
        self._isolation = asyncio.Lock()  # One request at a time runs in isolation.
        self._heartbeat_ms = max(1, int(1000 * min(_MAX_HEARTBEAT_S, predictor.silence_limit_s / 10)))

    async def generate(
        self, generation: Generation, deadline: Deadline, first_token: FirstToken
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of the whole answer; raises MillraceError; closing the generator cancels the running call."""
        if self._quarantine and self._quarantine.refuses(_fingerprint(generation)):
            raise RequestFailedError(_REFUSED)
        progress = _Progress(generation, CrashCount(self._resume_limit))
        backoff = self._predictor.backoff(deadline)
        while True:
            try:
                async with aclosing(self._call(progress, backoff, first_token)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except BrokenAnswerError:
                raise
            except (HopBrokenError, NotReadyError, OverloadedError) as error:
                ended_by = error
            except NotFoundError as error:
                if not progress.was_moved:
                    raise
                # A replica that has started again may lack what was loaded later; another one has it.
                ended_by = NotReadyError(error.message, hop=error.hop)
            progress.ended(ended_by)
            if generation.resumes and progress.crashes.next_call is NextCall.NONE:
                self._quarantine.add(_fingerprint(generation))
                logger.error("request %s has ended its predictor even alone and is refused", generation.request_id)
                raise RequestFailedError(_REFUSED)
            await backoff.pause(progress.last_word(ended_by), ended_by.retry_after_ms)

    async def _call(
        self, progress: _Progress, backoff: Backoff, first_token: FirstToken
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of the next call, which goes on where the last one ended."""
        generation, is_resume = progress.generation, bool(progress.output_ids)
        alone = generation.resumes and progress.crashes.next_call is NextCall.ISOLATED
        with ExitStack() as turn:
            if alone:
                await backoff.acquire(self._isolation)
                turn.callback(self._isolation.release)
            options = CallOptions(
                resumes=generation.resumes,
                heartbeat_ms=self._heartbeat_ms if generation.resumes else None,
                alone=alone,
                first_token_timeout_ms=None if is_resume else first_token.left_ms,
                fingerprint=progress.fingerprint,
            )
            span = progress.next_span()
            is_first = True
            call = self._predictor.generate(generation, progress.output_ids, options, backoff.deadline, span)
            async with aclosing(call) as chunks:
                async for chunk in chunks:
                    if is_first:
                        is_first = False
                        progress.check_weights(chunk.fingerprint)
                    backoff.reset()
                    if chunk.runs_alone:
                        progress.crashes.isolated()
                    if chunk.token_ids or chunk.finish_reason is not None:
                        turn.close()  # It has run in isolation without a crash.
                        progress.take(chunk)
                        backoff.answer_began()
                        chunk.fingerprint = progress.fingerprint
                        chunk.resumed, is_resume = is_resume, False
                        yield chunk
                    moves = chunk.is_leaving and chunk.finish_reason is None
                    if moves and self._can_resume(generation.model, progress.fingerprint):
                        raise DrainingError("it stops, and another one goes on", hop="predictor")


class _Progress:
    """What a generation has so far, over all its calls."""

    def __init__(self, generation: Generation, crashes: CrashCount) -> None:
        self.generation = generation
        self.crashes = crashes
        self.output_ids: list[int] = []
        # Of the weights that have given the ids so far; "" while there are none, or the predictor reports none.
        self.fingerprint = ""
        self._answering = ""  # Of those that answer the latest call.
        self._cached_tokens: int | None = None
        self.was_moved = False  # A predictor that had it gave it up.
        self._span: CallSpan | None = None  # The latest call's.
        self._follows = ""

    def check_weights(self, fingerprint: str) -> None:
        """Notes which weights answer a call; raises OtherWeightsError where these cannot resume the answer."""
        if self.fingerprint and fingerprint != self.fingerprint:
            raise OtherWeightsError("a predictor would have gone on with other weights", hop="predictor")
        self._answering = fingerprint

    def take(self, chunk: TokenChunk) -> None:
        """Adds a chunk, which gets how much of the prompt the first call found in a cache."""
        if not self.output_ids:
            self.fingerprint = self._answering
        self.output_ids += chunk.token_ids
        self.crashes.token()
        if self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        chunk.cached_tokens = self._cached_tokens
        if chunk.usage is not None and self._cached_tokens is not None:
            chunk.usage.cached_tokens = self._cached_tokens

    def next_span(self) -> CallSpan:
        """The next call's, which links to that of the newest predictor that answered, or else to the first call's."""
        if self._span is not None:
            self._follows = self._span.answered_by or self._follows or self._span.traceparent
        self._span = CallSpan(self._follows)
        return self._span

    def ended(self, error: MillraceError) -> None:
        """Takes note of what ended a call; raises it where it ends the request too."""
        if self.output_ids and not self.generation.resumes:
            raise error
        if isinstance(error, OverloadedError) and not (self.output_ids or self.was_moved):
            raise error
        self.crashes.call_ended(crashed=isinstance(error, HopBrokenError))
        if not self.generation.resumes and self.crashes.next_call is not NextCall.SHARED:
            raise error  # It cannot run in isolation, so the cause of the crashes cannot be found.
        if isinstance(error, (HopBrokenError, DrainingError)):
            self.was_moved = True
            moved = (self.generation.request_id, len(self.output_ids), error.message)
            logger.info("request %s is moved after %d tokens: %s", *moved)

    def last_word(self, error: MillraceError) -> MillraceError:
        """What the request ends with where no predictor takes it in time."""
        if self.output_ids and isinstance(error, OtherWeightsError):
            return HopBrokenError(
                "the model's weights have changed, and no predictor has the old ones", hop="predictor"
            )
        if self.output_ids:
            return HopBrokenError("the predictor is gone, and no other one went on", hop="predictor")
        if isinstance(error, HopBrokenError):
            return NotReadyError("no predictor answers", hop="predictor")
        return error


def _fingerprint(generation: Generation) -> bytes:
    return request_fingerprint(generation.model, generation.prompt_ids, generation.sampling)
