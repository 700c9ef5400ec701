"""The merging output slot: the engine thread writes and never waits, one reader on the event loop takes.

A slow reader gets bigger chunks, not a longer queue: memory is bounded by the request's max_tokens.
"""

from __future__ import annotations

import asyncio
import threading

from millrace.errors import MillraceError
from millrace.sampling import SamplingParameters
from services.predictor.engine.interface import Chunk, Usage


class MergingSlot:
    """One request's output. `publish` and `fail` may be called by any thread, `read` by one task."""

    def __init__(self, sampling: SamplingParameters) -> None:
        self._chunk_tokens = sampling.chunk_tokens
        self._chunk_s = sampling.chunk_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake: asyncio.Future[None] | None = None
        self._wake_at = 1
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: tuple[str, Usage] | None = None
        self._error: MillraceError | None = None
        self.cancelled = False  # The engine looks at it before each step.

    def cancel(self) -> None:
        """Tells the engine to stop; any thread may."""
        self.cancelled = True

    def publish(self, token_id: int, logprob: float | None, finish: tuple[str, Usage] | None = None) -> None:
        """Adds a token; the last one comes with the reason to finish and the usage."""
        with self._lock:
            if not self._ended():
                self._ids.append(token_id)
                if logprob is not None:
                    self._logprobs.append(logprob)
                self._finish = finish
                self._notify()

    def fail(self, error: MillraceError) -> None:
        """Ends the output with an error; what was published before is still read."""
        with self._lock:
            if not self._ended():
                self._error = error
                self._notify()

    async def read(self) -> Chunk:
        """Everything new, once there is as much as the request asks for."""
        await self._until(1, None)
        if self._chunk_tokens > 1:
            await self._until(self._chunk_tokens, self._chunk_s or None)
        with self._lock:
            ids, self._ids = self._ids, []
            logprobs, self._logprobs = self._logprobs, []
            if not ids and self._error is not None:
                raise self._error
            if self._finish is None:
                return Chunk(ids, logprobs)
            reason, usage = self._finish
            return Chunk(ids, logprobs, reason, usage)

    async def _until(self, tokens: int, timeout_s: float | None) -> None:
        """Waits for so many tokens, the end, or the time to be up."""
        with self._lock:
            if self._ended() or len(self._ids) >= tokens:
                return
            self._wake_at = tokens
            wake = self._wake = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await wake
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._wake = None

    def _ended(self) -> bool:
        return self._finish is not None or self._error is not None

    def _notify(self) -> None:
        """Wakes the reader if what it waits for is there. The lock is held."""
        if self._wake is not None and (self._ended() or len(self._ids) >= self._wake_at):
            wake, self._wake = self._wake, None
            # A loop that has closed has no reader left.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_set, wake)


def _set(wake: asyncio.Future[None]) -> None:
    if not wake.done():
        wake.set_result(None)
