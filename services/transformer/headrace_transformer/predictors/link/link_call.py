"""A generation's call at one predictor, over a link, with the tokens that are not read yet.

The link writes, one task reads. A slow reader gets larger chunks, not a longer queue: memory is bounded by the
request's `max_tokens`. Owned by the event loop.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from grpc import StatusCode

from headrace.errors import HeadraceError
from headrace.frames import read_error
from headrace.oip.prompt_scores import reader_of
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import SamplingParameters
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.oip.oip_call import BrokenAnswerError


class Link(Protocol):
    """What a call needs of its link (link.py)."""

    name: str
    loads: Mapping[str, pb.EngineLoad]

    @property
    def is_leaving(self) -> bool: ...

    def cancel(self, call: "LinkCall") -> None: ...


class LinkCall:
    """See the module. `span` is the call's; it ends with the call."""

    def __init__(self, submission: pb.Submission, sampling: SamplingParameters, span: ClientSpan) -> None:
        self.link: Link | None = None
        self.number = 0
        self.submitted_at = 0.0  # By the event loop's clock.
        self.chunk = TokenChunk()  # The tokens that are not read yet; the link adds them.
        self.engine_s = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self.is_accepted = False
        self.has_begun = False
        self.runs_alone = False
        self.fingerprint = ""
        self._span = span
        self._read_scores = reader_of(submission)
        self._chunk_tokens = self._wanted = sampling.chunk_tokens
        self._chunk_s = sampling.chunk_ms / 1000
        self._hold: asyncio.TimerHandle | None = None
        self._cached_tokens: int | None = None
        self._error: HeadraceError | None = None

    @property
    def is_leaving(self) -> bool:
        """The predictor is about to stop."""
        return self.link is not None and self.link.is_leaving

    @property
    def predictor(self) -> str:
        """The name of the predictor."""
        return "" if self.link is None else self.link.name

    async def read(self) -> TokenChunk | None:
        """The new tokens, once there are as many as the request asks for; None: none, but the call's state has changed.

        Raises the call's HeadraceError, after its tokens.
        """
        if (chunk := self.poll()) is None:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
            chunk = self.poll()
        return chunk

    def poll(self) -> TokenChunk | None:
        """What `read` would return at once, None if it would wait; raises the call's HeadraceError."""
        if self._error is not None and not self.chunk.token_ids:
            raise self._error
        is_ended = self.chunk.finish_reason is not None or self._error is not None
        if is_ended or len(self.chunk.token_ids) >= self._wanted:
            return self._taken()
        if self.chunk.token_ids:
            self._hold_tokens()
        return None

    def close(self) -> None:
        """Cancels the call unless it has ended."""
        self._release_hold()
        if self.link is not None:
            self.link.cancel(self)
        self._span.end(StatusCode.CANCELLED)

    def accept(self, fingerprint: str, span: str) -> None:
        self.is_accepted = True
        self.fingerprint = fingerprint
        self._span.answered_by = span
        self.wake()

    def begin(self, begun: pb.Begun) -> None:
        """Reads the data that come with the first token."""
        self.has_begun = True
        self._span.message()
        self._cached_tokens = begun.cached_tokens
        if self._read_scores is not None:
            try:
                self.chunk.prompt = self._read_scores(begun.prompt)
            except ValueError as error:
                self.fail(BrokenAnswerError(f"the predictor's {error}", hop="predictor"))

    def add_logprobs(self, logprobs: pb.TokenLogprobs) -> None:
        if len(logprobs.top_ids) != len(logprobs.top):
            self.fail(BrokenAnswerError("the predictor's log probabilities are incomplete", hop="predictor"))
            return
        self.chunk.logprobs.append(logprobs.chosen)
        if logprobs.top_ids:
            self.chunk.top_logprobs.append(list(zip(logprobs.top_ids, logprobs.top, strict=True)))

    def run_alone(self) -> None:
        """The predictor computes nothing else until the next token."""
        self.runs_alone = True
        self.wake()

    def end(self, ended: pb.Ended) -> None:
        """Ends the call with the predictor's result."""
        if ended.HasField("error"):
            self.fail(read_error(ended.error))
            return
        self.chunk.finish_reason, self.chunk.usage = ended.finish_reason, ended.usage
        self._span.end(StatusCode.OK)
        self.wake()

    def fail(self, error: HeadraceError) -> None:
        """Ends the call with an error, after the tokens that it already has; only the first end has an effect."""
        if self.chunk.finish_reason is None and self._error is None:
            self._error = error
            self._span.end(error.status)
            self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def wake_for_tokens(self) -> None:
        """Wakes the reader if there are as many tokens as it waits for."""
        if len(self.chunk.token_ids) >= self._wanted:
            self.wake()
        else:
            self._hold_tokens()

    def _hold_tokens(self) -> None:
        """Holds tokens back for `chunk_ms` at most."""
        if self._hold is None and self._chunk_s:
            self._hold = asyncio.get_running_loop().call_later(self._chunk_s, self._release)

    def _release(self) -> None:
        self._wanted = 1
        self.wake()

    def _release_hold(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    def _taken(self) -> TokenChunk:
        chunk, self.chunk = self.chunk, TokenChunk()
        chunk.cached_tokens, chunk.fingerprint, chunk.engine_s = self._cached_tokens, self.fingerprint, self.engine_s
        if self._hold is not None or self._wanted != self._chunk_tokens:
            self._release_hold()
            self._wanted = self._chunk_tokens
        return chunk
