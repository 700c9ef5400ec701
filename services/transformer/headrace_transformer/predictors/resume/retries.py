"""Retries of one request while no predictor is ready: exponential backoff within a limit and the deadline.

A predictor that restarts, drains or has not started yet is no reason to refuse a request: the request waits and
retries. It waits for `start_wait_s` at most while its caller has received nothing and could ask elsewhere, for `wait_s`
once its answer has begun, and never beyond its deadline. The first retry is immediate, the second follows after 20 ms,
and the pause doubles up to half a second, less a random part, so that streams that broke together do not return
together. Owned by one request, on the event loop.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.deadline import Deadline
from headrace.errors import DrainingError, HeadraceError, NotReadyError

T = TypeVar("T")

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5


class Backoff:
    """The retries of one request; see the module. Durations are in seconds."""

    def __init__(self, deadline: Deadline, wait_s: float, start_wait_s: float | None = None) -> None:
        self.deadline = deadline
        self._wait_s = wait_s
        self._limit_now_s = wait_s if start_wait_s is None else min(wait_s, start_wait_s)
        self._gives_up_at: float | None = None  # Set while no predictor answers.
        self._pause_s = 0.0

    def reset(self) -> None:
        """A predictor has answered: limit and backoff start anew."""
        self._gives_up_at = None
        self._pause_s = 0.0

    def answer_began(self) -> None:
        """The caller has received a part of the answer."""
        self._limit_now_s = self._wait_s

    async def pause(self, error: HeadraceError, retry_after_ms: int | None = None) -> None:
        """Waits until the next retry is due; raises `error` where the limit is reached, or DeadlineError."""
        limit_s = self._limit_s(error)
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        await asyncio.sleep(min(limit_s, max(pause_s, (retry_after_ms or 0) / 1000)))

    async def wait_for(self, changed: asyncio.Event, error: HeadraceError) -> None:
        """Waits until `changed` is set; raises `error` at the limit, or DeadlineError."""
        limit_s = self._limit_s(error)
        try:
            async with asyncio.timeout(limit_s):
                await changed.wait()
        except TimeoutError:
            self._limit_s(error)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call()`, which is retried while no predictor is ready; other errors are raised."""
        while True:
            try:
                return await call()
            except NotReadyError as error:
                await self.pause(error, error.retry_after_ms)

    async def acquire(self, turn: asyncio.Lock) -> None:
        """Waits for a lock that other requests hold, which does not count towards the limit; raises DeadlineError."""
        begun = time.monotonic()
        async with self.deadline.scope():
            await turn.acquire()
        if self._gives_up_at is not None:
            self._gives_up_at += time.monotonic() - begun

    def _limit_s(self, error: HeadraceError) -> float:
        """The longest wait that is allowed now; raises what a request ends with that may not wait at all."""
        left_s = self.deadline.left()
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + self._limit_now_s
        if now >= self._gives_up_at:
            # "Draining" would have the gateway ask this service again, which is not what drains.
            raise NotReadyError(error.message, hop=error.hop) if isinstance(error, DrainingError) else error
        wait_s = self._gives_up_at - now
        return wait_s if left_s is None else min(wait_s, left_s)
