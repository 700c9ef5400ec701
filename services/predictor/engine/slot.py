"""The merging output slot: the engine thread writes and never waits, one reader on the event loop takes.

A slow reader gets bigger chunks, not a longer queue: memory is bounded by the request's max_tokens.
Publishing does not wake the reader by itself: the engine wakes all readers of a step at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

from millrace.errors import MillraceError
from millrace.sampling import SamplingParameters
from services.predictor.engine.interface import Chunk, Logprobs, Usage

Reader = asyncio.Future[None]


class MergingSlot:
    """One request's output. `publish` and `fail` may be called by any thread, `read` by one task."""

    def __init__(self, sampling: SamplingParameters) -> None:
        self._chunk_tokens = sampling.chunk_tokens
        self._chunk_s = sampling.chunk_ms / 1000
        self._lock = threading.Lock()
        self._wake: Reader | None = None
        self._wake_at = 1
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._finish: tuple[str, Usage] | None = None
        self._error: MillraceError | None = None
        self.cancelled = False  # The engine looks at it before each step.

    def cancel(self) -> None:
        """Tells the engine to stop; any thread may."""
        self.cancelled = True

    def publish(
        self, token_id: int, logprobs: Logprobs | None, finish: tuple[str, Usage] | None = None
    ) -> Reader | None:
        """Adds a token, the last one with the reason to finish and the usage; the reader that has to be woken."""
        with self._lock:
            if self._ended():
                return None
            self._ids.append(token_id)
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._finish = finish
            return self._satisfied()

    def fail(self, error: MillraceError) -> None:
        """Ends the output with an error; what was published before is still read."""
        with self._lock:
            if self._ended():
                return
            self._error = error
            reader = self._satisfied()
        if reader is not None:
            wake([reader])

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
            reader = self._wake = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await reader
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._wake = None

    def _ended(self) -> bool:
        return self._finish is not None or self._error is not None

    def _satisfied(self) -> Reader | None:
        """The reader, if what it waits for is there. The lock is held."""
        if self._wake is None or not (self._ended() or len(self._ids) >= self._wake_at):
            return None
        reader, self._wake = self._wake, None
        return reader


def wake(readers: Iterable[Reader]) -> None:
    """Wakes waiting readers, with one call for each of their event loops; any thread may."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Reader]] = defaultdict(list)
    for reader in readers:
        by_loop[reader.get_loop()].append(reader)
    for loop, waiting in by_loop.items():
        # A loop that has closed has no reader left; it may do so at any moment.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, waiting)


def _set(readers: list[Reader]) -> None:
    for reader in readers:
        if not reader.done():
            reader.set_result(None)
