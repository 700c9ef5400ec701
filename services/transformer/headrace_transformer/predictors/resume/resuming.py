"""One generation made of as many calls as it takes: another predictor resumes it when its predictor crashes.

The transformer keeps every token id that it has received. When a call ends early, it makes another one at another
predictor, or at the same one after its restart, with the same prompt, parameters and seed, and with the ids so far. The
sampler depends only on the seed and the position, so the answer continues unchanged. The end of a call decides what
follows:

- a crash (the engine died) or the loss of the predictor (the link broke or fell silent): the next call resumes after
  the ids so far; progress.py decides how often, and when in isolation;
- a predictor that is about to stop: an answer that has begun goes on there until another predictor, which resumes it
  meanwhile, has begun too (parallel_call.py); where none does, it is handed back at the end of the drain;
- a predictor that hands the stream back, or has hung since before the call: the next call resumes in the same way,
  without a limit;
- an overloaded predictor: a new request is refused at once, a resumed one waits;
- any other error is the request's own, and ends it.

An answer comes from one set of weights: once it has begun, only a predictor with the same `fingerprint` resumes it. The
request waits for the right one.

Before the first token a resume is a plain retry; a server that is not ours is called again only then. Between calls the
request waits, see retries.py. A request that crashes its predictor in isolation is not retried, and identical requests
are quarantined: so it cannot crash all replicas, and requests beside it continue.

Owned by the event loop; one `ResumingGenerator` for all requests.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from headrace.deadline import PASSED, Deadline
from headrace.errors import (
    DeadlineError,
    DrainingError,
    HeadraceError,
    HopBrokenError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
)
from headrace.rpc.client.interceptors import ClientSpan, ClientSpans
from headrace.sampling import SamplingParameters
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.predictors import RESTARTED, TokenChunk
from headrace_transformer.predictors.discovery.descriptions import Dialect
from headrace_transformer.predictors.engines.pools import EnginePool
from headrace_transformer.predictors.engines.token_call import TokenCall
from headrace_transformer.predictors.link.link import METHOD, PredictorLink
from headrace_transformer.predictors.link.link_call import Link, LinkCall
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.predictors.link.parallel_call import ParallelCall
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.oip.oip_call import BrokenAnswerError, OipCall
from headrace_transformer.predictors.resume.progress import (
    CrashCount,
    NextCall,
    Progress,
    Quarantine,
    next_submission,
    request_fingerprint,
)
from headrace_transformer.predictors.resume.retries import Backoff

logger = logging.getLogger(__name__)

Call: TypeAlias = LinkCall | ParallelCall | OipCall | TokenCall

ENGINE_METHOD = "/openai.Engine/Completions"  # In spans.
_REFUSED = "this request has crashed its predictor repeatedly; it is refused for ten minutes"


class EngineModel(NamedTuple):
    """A model at engines, and the fields that its requests have beside those that are ours."""

    pool: EnginePool
    further_fields: Mapping[str, Any]


class ResumingGenerator:
    """See the module; after `resume_limit` crashes in a row a request runs in isolation."""

    def __init__(self, links: Links, predictor: PredictorClient, resume_limit: int = 2) -> None:
        self.links = links
        self.predictor = predictor
        self.quarantine = Quarantine()
        self.isolation = asyncio.Lock()  # One request at a time runs in isolation.
        self.spans = ClientSpans()
        self._resume_limit = resume_limit

    def open(
        self,
        submission: Submission,
        sampling: SamplingParameters,
        deadline: Deadline,
        first_token: Deadline,
        *,
        elsewhere: Dialect | EngineModel | None = None,
        start_wait_s: float | None = None,
        fingerprint: str = "",
        output_ids: Sequence[int] = (),
    ) -> "TokenStream":
        """The tokens of a generation; the submission has its `sampling`.

        `elsewhere`: a server that is not ours, or engines that generate in place of predictors; `start_wait_s`: the
        longest wait for a predictor to begin it, None for the default; `fingerprint`: of the weights that must generate
        it, "" for any; `output_ids`: tokens that they have generated already, after which the answer continues.

        Raises RequestFailedError if the request is in quarantine.
        """
        if self.quarantine and self.quarantine.refuses(request_fingerprint(submission, sampling)):
            raise RequestFailedError(_REFUSED)
        backoff = self.predictor.backoff(deadline, start_wait_s)
        progress = Progress(
            request_id=submission.request_id,
            resumes=not isinstance(elsewhere, Dialect),
            crashes=CrashCount(self._resume_limit),
            fingerprint=fingerprint,
            output_ids=list(output_ids),
            isolates=elsewhere is None,
        )
        return TokenStream(self, submission, sampling, elsewhere, progress, backoff, first_token)


@dataclass(eq=False)
class TokenStream:
    """The tokens of one generation; one task reads it, and closes it."""

    generator: ResumingGenerator
    submission: Submission
    sampling: SamplingParameters
    elsewhere: Dialect | EngineModel | None
    progress: Progress
    backoff: Backoff
    first_token: Deadline
    _call: Call | None = None
    _is_resume: bool = False  # The next tokens are the first after a resume.
    _is_isolated: bool = False  # The call holds the lock of isolated ones.
    _place: ExitStack | None = None  # At engines.
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        if (left_s := self.backoff.deadline.left()) is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._deadline_passed)

    async def read(self) -> TokenChunk:
        """The next tokens, at least one or the end; raises HeadraceError."""
        while True:
            call = self._call
            if call is None:
                call = self._call = await self._next_call()
            try:
                chunk = await call.read()
                if chunk is None:
                    self._follow(call)
                elif chunk.token_ids or chunk.finish_reason is not None:
                    self._take(chunk)
                    return chunk
                if isinstance(call, LinkCall) and call.is_leaving:
                    self._move(call)
            except BrokenAnswerError:
                raise
            except (HopBrokenError, NotReadyError, OverloadedError) as error:
                await self._after(error)
            except NotFoundError as error:
                if not self.progress.was_moved:
                    raise
                # A replica that has started again may lack what was loaded later; another one has it.
                await self._after(NotReadyError(error.message, hop=error.hop))

    def close(self) -> None:
        """Cancels the running call; does nothing for a generation that has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_call()
        if self._place is not None:
            self._place.close()

    async def _next_call(self) -> Call:
        """Begins the call that continues where the last one ended; waits while no predictor is ready.

        What it raises ends the request.
        """
        progress, backoff = self.progress, self.backoff
        self._is_resume = bool(progress.output_ids)
        if isinstance(self.elsewhere, EngineModel):
            return await self._at_engine(self.elsewhere)
        if (dialect := self.elsewhere) is not None:
            method, span = self.generator.predictor.generate, progress.next_span()
            return OipCall(method, self.submission, self.sampling, dialect, backoff.deadline, span)
        is_isolated = progress.crashes.next_call is NextCall.ISOLATED
        link = await self._ready_link()
        if is_isolated:
            await backoff.acquire(self.generator.isolation)
            self._is_isolated = True
            link = await self._ready_link()
        call = self._submit(link, progress.next_span(), is_isolated)
        if self.sampling.hedge > 1 and not is_isolated:
            return self._in_parallel(call, self.sampling.hedge)
        return call

    async def _at_engine(self, model: EngineModel) -> TokenCall:
        """Begins a request at an engine, once one answers."""
        progress, pool = self.progress, model.pool
        if self._place is None:
            async with self.backoff.deadline.scope():
                self._place = await pool.places.take(self.submission.client, self.submission.weight)
        await pool.until_ready(self.backoff, progress.last_word)
        span = progress.next_span()
        self.generator.spans.begin(ENGINE_METHOD, self.backoff.deadline.left(), span)
        return pool.call(self.submission, progress.output_ids, self.sampling, model.further_fields, span)

    def _move(self, call: LinkCall) -> None:
        """Leaves a predictor that is about to stop, if there is another; raises DrainingError for a new call."""
        if not self.generator.links.can_resume(self.submission.model, self.progress.fingerprint):
            return
        error = DrainingError("the predictor is stopping, and another one resumes the answer", hop="predictor")
        if not call.has_begun or self._is_isolated:
            raise error
        self.progress.moves(error)
        self._call = self._in_parallel(call, 1)

    def _in_parallel(self, call: LinkCall, calls: int) -> ParallelCall:
        return ParallelCall(call, calls, self._twin, self.progress.output_ids)

    def _submit(self, link: PredictorLink, span: ClientSpan, is_isolated: bool) -> LinkCall:
        """Begins a call at a predictor, which continues after the tokens so far."""
        timeout_s = self.backoff.deadline.left()
        self.generator.spans.begin(METHOD, timeout_s, span)
        submission = next_submission(self.submission, self.progress, span, is_isolated, timeout_s)
        if not self.progress.output_ids and (left_s := self.first_token.left()) is not None:
            submission.first_token_timeout_s = left_s
        call = LinkCall(submission, self.sampling, span)
        link.submit(call, submission)
        return call

    def _twin(self, calls: Sequence[LinkCall]) -> LinkCall | None:
        """A call beside others, at another predictor with the same weights, if there is one.

        After the death of a predictor, and before its stop, all of its answers need one, and no answer waits for these
        calls. So few of them catch up at a time: the steps of the streams beside them stay short.
        """
        links: list[Link | None] = [call.link for call in calls]
        model = self.submission.model
        loaded = (link.loads[model].fingerprint for link in links if link and model in link.loads)
        fingerprint = self.progress.fingerprint or next(loaded, "")
        if not fingerprint:
            return None
        catches_up = bool(self.progress.output_ids)
        if catches_up:
            links += [link for link in self.generator.links.all if not link.can_catch_up]
        try:
            link = self._choose(fingerprint, links)
        except NotReadyError:
            return None
        call = self._submit(link, self.progress.next_span() if catches_up else ClientSpan(), is_isolated=False)
        if catches_up:
            link.catches_up(call)
        return call

    async def _ready_link(self) -> PredictorLink:
        """A link to a predictor that can take the next call, once there is one."""
        progress = self.progress
        while True:
            try:
                return self._choose(progress.fingerprint)
            except NotReadyError as error:
                await self.backoff.wait_for(self.generator.links.changed, progress.last_word(error))

    def _choose(self, fingerprint: str, besides: Collection[Link | None] = ()) -> PredictorLink:
        return self.generator.links.choose(self.submission, fingerprint, self.sampling.cache_salt, besides)

    def _follow(self, call: Call) -> None:
        """Records a change of a call's state."""
        if call.is_accepted:
            self.progress.check_weights(call.fingerprint)
            self.backoff.reset()
        if call.runs_alone:
            self.progress.crashes.isolated()

    def _take(self, chunk: TokenChunk) -> None:
        progress = self.progress
        if self._call is not None:
            self._follow(self._call)
            chunk.resumed |= self._is_resume
            if isinstance(self._call, TokenCall) and (chunk.resumed or not progress.output_ids):
                chunk.continuity = self._call.continuity or (RESTARTED if progress.was_moved else "")
            if chunk.resumed or not progress.output_ids:
                chunk.predictor = self._call.predictor
        self._end_isolation()  # It has run in isolation without a crash.
        progress.take(chunk)
        self.backoff.reset()
        self.backoff.answer_began()
        chunk.fingerprint = progress.fingerprint
        self._is_resume = False
        if chunk.finish_reason is not None:
            self.close()

    async def _after(self, error: HeadraceError) -> None:
        """Waits until the next call is due; raises what ends the request."""
        progress = self.progress
        if self._call is not None and self._call.runs_alone:  # Its end may come with the notice.
            progress.crashes.isolated()
        self._end_call()
        progress.ended(error)
        if progress.isolates and progress.crashes.next_call is NextCall.NONE:
            self.generator.quarantine.add(request_fingerprint(self.submission, self.sampling))
            logger.error(
                "request %s has crashed its predictor in isolation and is quarantined", self.submission.request_id
            )
            raise RequestFailedError(_REFUSED)
        await self.backoff.pause(progress.last_word(error), error.retry_after_ms)

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()
        self._end_isolation()

    def _end_isolation(self) -> None:
        if self._is_isolated:
            self._is_isolated = False
            self.generator.isolation.release()

    def _deadline_passed(self) -> None:
        """Ends the running call; between two calls the backoff notices it."""
        if isinstance(self._call, LinkCall | ParallelCall | TokenCall):
            self._call.fail(DeadlineError(PASSED))
