"""How long one request waits for predictors that are away: its deadline, a limit of its own, and the back-off.

A predictor that restarts, drains or is not there yet is no reason to refuse a request, which waits instead: at most
`start_wait_s` without an answer of any predictor while its caller has nothing yet and may ask elsewhere, `wait_s` once
its answer has begun, and never beyond its deadline. The first try after a failure is made at
once, the next ones 20 ms after each other, then twice that, up to half a second, less a random part, so that streams
that broke together do not come back together. Owned by one request, on the event loop; seconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millrace.errors import DeadlineError, DrainingError, MillraceError, NotReadyError

T = TypeVar("T")

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5


class Patience:
    """One request's; `timeout_s` is what its deadline had left at the time `since`, or now; None: it has none."""

    def __init__(
        self,
        wait_s: float,
        timeout_s: float | None = None,
        since: float | None = None,
        start_wait_s: float = math.inf,
    ) -> None:
        self._wait_s = wait_s
        self._limit_now_s = min(wait_s, start_wait_s)
        self._ends_at = None if timeout_s is None else (time.monotonic() if since is None else since) + timeout_s
        self._gives_up_at: float | None = None  # There while no predictor answers.
        self._pause_s = 0.0

    @property
    def left_s(self) -> float | None:
        """What the deadline has left, None where there is none; raises DeadlineError once it has passed."""
        if self._ends_at is None:
            return None
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the deadline passed")
        return left_s

    def answered(self) -> None:
        """A predictor has answered: the limit and the back-off begin anew."""
        self._gives_up_at = None
        self._pause_s = 0.0

    def begun(self) -> None:
        """The caller has some of the answer."""
        self._limit_now_s = self._wait_s

    async def pause(self, error: MillraceError, retry_after_ms: int | None = None) -> None:
        """Waits until the next try is due; raises `error` where the limit is reached, or DeadlineError."""
        limit_s = self._limit_s(error)
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        await asyncio.sleep(min(limit_s, max(pause_s, (retry_after_ms or 0) / 1000)))

    async def until(self, changed: asyncio.Event, error: MillraceError) -> None:
        """Waits until `changed` is set, which may end what `error` says; raises it at the limit, or DeadlineError."""
        limit_s = self._limit_s(error)
        try:
            async with asyncio.timeout(limit_s):
                await changed.wait()
        except TimeoutError:
            self._limit_s(error)

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call()`, which is tried again while no predictor is ready; other errors pass."""
        while True:
            try:
                return await call()
            except NotReadyError as error:
                await self.pause(error, error.retry_after_ms)

    async def acquire(self, turn: asyncio.Lock) -> None:
        """Waits for other requests and not for a predictor: the limit comes no nearer; raises DeadlineError."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.left_s):
                await turn.acquire()
        except TimeoutError:
            raise DeadlineError("the deadline passed") from None
        if self._gives_up_at is not None:
            self._gives_up_at += time.monotonic() - begun

    def _limit_s(self, error: MillraceError) -> float:
        """The longest wait that is allowed now; raises what a request ends with that may not wait at all."""
        left_s = self.left_s
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + self._limit_now_s
        if now >= self._gives_up_at:
            # "Draining" would have the gateway ask this service again, which is not what drains.
            raise NotReadyError(error.message, hop=error.hop) if isinstance(error, DrainingError) else error
        wait_s = self._gives_up_at - now
        return wait_s if left_s is None else min(wait_s, left_s)
