"""The output of a sequence, as the engine writes it, and the merging slot of the front's own requests."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.oip.prompt_scores import PromptLogprobs
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import Chunk, Logprobs, Timeline, Usage


class SequenceOutput(Protocol):
    """Where the engine puts the output of one sequence; it never waits for a reader, except in `run_alone`."""

    timeline: Timeline

    @property
    def cancelled(self) -> bool:
        """Whether the caller has left; the engine reads it before each step."""

    def start(self, now: float, cached_tokens: int) -> None:
        """Records the start of the first step that computes a part of the sequence."""

    def run_alone(self, timeout_s: float) -> bool:
        """Reports that the sequence runs isolated; returns whether its caller still waits for it.

        Returns once the caller has been notified, or has left, or after the timeout.
        """

    def publish(
        self,
        token_id: int,
        logprobs: Logprobs | None,
        finish: tuple[str, Usage] | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        """Adds a token, the last one with the finish reason and the usage; `prompt` comes with the first token."""

    def finish(self, reason: str, usage: Usage) -> None:
        """Ends the output without another token."""

    def fail(self, error: HeadraceError) -> None:
        """Ends the output with an error, after the tokens that it already has."""


class MergingSlot:
    """One request's output, owned by the event loop; one task reads. `on_cancel` is called with each cancel.

    A slow reader gets bigger chunks, not a longer queue: memory is bounded by the request's max_tokens.
    """

    def __init__(self, sampling: SamplingParameters, on_cancel: Callable[[], None] | None = None) -> None:
        self._on_cancel = on_cancel
        self._chunk_tokens = sampling.chunk_tokens
        self._chunk_s = sampling.chunk_ms / 1000
        self._wake: asyncio.Future[None] | None = None
        self._wake_at = 1
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt: PromptLogprobs | None = None
        self._finish: tuple[str, Usage] | None = None
        self._error: HeadraceError | None = None
        self.timeline = Timeline()
        self.cancelled = False

    def cancel(self) -> None:
        """Asks the engine to stop."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def start(self, now: float, cached_tokens: int) -> None:
        self.timeline.started = now

    def run_alone(self, timeout_s: float) -> bool:
        """Its reader is not notified."""
        return not (self.cancelled or self._ended())

    def publish(
        self,
        token_id: int,
        logprobs: Logprobs | None,
        finish: tuple[str, Usage] | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        if self._ended():
            return
        self._ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._finish = finish
        if prompt is not None:
            self._prompt = prompt
        self._wake_reader()

    def finish(self, reason: str, usage: Usage) -> None:
        if not self._ended():
            self._finish = reason, usage
            self._wake_reader()

    def fail(self, error: HeadraceError) -> None:
        if not self._ended():
            self._error = error
            self._wake_reader()

    async def read(self) -> Chunk:
        """Returns all new tokens, once there are as many as the request asks for, or after `chunk_ms`."""
        await self._until(1)
        if self._chunk_tokens > 1:
            await self._until(self._chunk_tokens, self._chunk_s or None)
        ids, self._ids = self._ids, []
        logprobs, self._logprobs = self._logprobs, []
        if not ids and self._error is not None:
            raise self._error
        prompt, self._prompt = self._prompt, None
        reason, usage = self._finish or (None, None)
        return Chunk(ids, logprobs, reason, usage, prompt)

    async def _until(self, tokens: int, timeout_s: float | None = None) -> None:
        """Waits for `tokens` tokens or the end, or for the timeout."""
        if self._has(tokens):
            return
        self._wake_at = tokens
        self._wake = asyncio.get_running_loop().create_future()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake
        finally:
            self._wake = None

    def _has(self, tokens: int) -> bool:
        return self._ended() or len(self._ids) >= tokens

    def _ended(self) -> bool:
        return self._finish is not None or self._error is not None

    def _wake_reader(self) -> None:
        """Wakes the reader, if what it waits for is there."""
        if self._wake is not None and not self._wake.done() and self._has(self._wake_at):
            self._wake.set_result(None)
