"""One generation out of as many calls as it takes: it goes on at another predictor when one dies under it.

Contract with the predictor: millrace/oip/resumable.py. What ends a call decides what comes next:

- a death (the connection broke, the engine died, or the predictor fell silent): the next call goes on after the ids so
  far; deaths.py says how often, and when alone;
- a predictor that is about to stop: the stream stays there until another one can go on with it;
- a predictor that is away, still loads, hands the stream back, or has not said a word since the call began, which is
  a hung process and none of the request's doing: the next call goes on likewise, as often as it takes;
- an overloaded one: a new request is refused at once, a resumed one waits;
- anything else is the request's own, and ends it.

An answer is of one model: once it has begun, only a predictor with the same weights goes on (`fingerprint`). One with
others refuses, and the request waits for the right one, through Envoy, which tries several replicas a call.

Before the first token the same is a retry. A predictor that cannot go on after given ids is asked again only before it.
Between calls the request waits, see retries.py. A request that ends a predictor even alone is not called again, and
the same one is refused for a while (poison.py): thus it cannot walk through all replicas, and requests that merely
stood beside it go on.

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
from services.transformer.predictors.deaths import Deaths, NextCall
from services.transformer.predictors.first_token import FirstToken
from services.transformer.predictors.poison import Poison, fingerprint
from services.transformer.predictors.retries import Backoff

logger = logging.getLogger(__name__)

_MAX_HEARTBEAT_S = 1.0
_REFUSED = "this request has ended its predictor again and again; it is refused for a while"


class ResumingGenerator:
    """See the module; `resume_limit` is how many deaths in a row are taken for bad luck.

    `have_taker(model, fingerprint)` says whether some replica would take a stream of these weights.
    """

    def __init__(
        self,
        predictor: PredictorClient,
        resume_limit: int = 2,
        have_taker: Callable[[str, str], bool] = lambda model, fingerprint: False,
    ) -> None:
        self._have_taker = have_taker
        self._predictor = predictor
        self._resume_limit = resume_limit
        self._poison = Poison()
        self._alone = asyncio.Lock()
        self._heartbeat_ms = max(1, int(1000 * min(_MAX_HEARTBEAT_S, predictor.silence_limit_s / 10)))

    async def generate(
        self, asked: Generation, deadline: Deadline, first_token: FirstToken
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of the whole answer; raises MillraceError; closing the generator cancels the running call."""
        if self._poison and self._poison.refuses(_fingerprint(asked)):
            raise RequestFailedError(_REFUSED)
        progress = _Progress(asked, Deaths(self._resume_limit))
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
            if asked.resumes and progress.deaths.next_call is NextCall.NONE:
                self._poison.add(_fingerprint(asked))
                logger.error("request %s has ended its predictor even alone and is refused", asked.request_id)
                raise RequestFailedError(_REFUSED)
            await backoff.pause(progress.last_word(ended_by), ended_by.retry_after_ms)

    async def _call(
        self, progress: _Progress, backoff: Backoff, first_token: FirstToken
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of the next call, which goes on where the last one ended."""
        asked, goes_on = progress.asked, bool(progress.output_ids)
        alone = asked.resumes and progress.deaths.next_call is NextCall.ALONE
        with ExitStack() as turn:
            if alone:
                await backoff.acquire(self._alone)
                turn.callback(self._alone.release)
            options = CallOptions(
                resumes=asked.resumes,
                heartbeat_ms=self._heartbeat_ms if asked.resumes else None,
                alone=alone,
                first_token_timeout_ms=None if goes_on else first_token.left_ms,
                fingerprint=progress.fingerprint,
            )
            span = progress.next_span()
            is_first = True
            call = self._predictor.generate(asked, progress.output_ids, options, backoff.deadline, span)
            async with aclosing(call) as chunks:
                async for chunk in chunks:
                    if is_first:
                        is_first = False
                        progress.answers(chunk.fingerprint)
                    backoff.reset()
                    if chunk.runs_alone:
                        progress.deaths.runs_alone()
                    if chunk.token_ids or chunk.finish_reason is not None:
                        turn.close()  # What it would do alone has been seen.
                        progress.take(chunk)
                        backoff.answer_began()
                        chunk.fingerprint = progress.fingerprint
                        chunk.resumed, goes_on = goes_on, False
                        yield chunk
                    moves = chunk.is_leaving and chunk.finish_reason is None
                    if moves and self._have_taker(asked.model, progress.fingerprint):
                        raise DrainingError("it stops, and another one goes on", hop="predictor")


class _Progress:
    """What a generation has so far, over all its calls."""

    def __init__(self, asked: Generation, deaths: Deaths) -> None:
        self.asked = asked
        self.deaths = deaths
        self.output_ids: list[int] = []
        self.fingerprint = (
            ""  # Of the weights that have given the ids so far; "" while there are none, or the predictor reports none.
        )
        self._answering = ""  # Of those that answer the latest call.
        self._cached_tokens: int | None = None
        self.was_moved = False  # A predictor that had it gave it up.
        self._span: CallSpan | None = None  # The latest call's.
        self._follows = ""

    def answers(self, fingerprint: str) -> None:
        """Takes note of which weights answer a call; raises OtherWeightsError where they cannot go on."""
        if self.fingerprint and fingerprint != self.fingerprint:
            raise OtherWeightsError("a predictor would have gone on with other weights", hop="predictor")
        self._answering = fingerprint

    def take(self, chunk: TokenChunk) -> None:
        """Adds a chunk, which gets how much of the prompt the first call found in a cache."""
        if not self.output_ids:
            self.fingerprint = self._answering
        self.output_ids += chunk.token_ids
        self.deaths.token()
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
        if self.output_ids and not self.asked.resumes:
            raise error
        if isinstance(error, OverloadedError) and not (self.output_ids or self.was_moved):
            raise error
        self.deaths.call_ended(died=isinstance(error, HopBrokenError))
        if not self.asked.resumes and self.deaths.next_call is not NextCall.SHARED:
            raise error  # It cannot run isolated, so the cause of the deaths cannot be found.
        if isinstance(error, (HopBrokenError, DrainingError)):
            self.was_moved = True
            told = (self.asked.request_id, len(self.output_ids), error.message)
            logger.info("request %s is moved after %d tokens: %s", *told)

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


def _fingerprint(asked: Generation) -> bytes:
    return fingerprint(asked.model, asked.prompt_ids, asked.sampling)
