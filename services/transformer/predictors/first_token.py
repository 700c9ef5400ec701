"""The first-token deadline: `x-first-token-timeout-ms`, what a caller allows until its answer begins.

Counted from the request's arrival, through every wait for a predictor, and apart from the deadline of the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from millrace.errors import DeadlineError
from millrace.oip.resumable import call_options_of
from millrace.payload.call import Origin

T = TypeVar("T")

_MARGIN_S = 0.01


class FirstToken:
    """One request's first-token deadline, if it has one; raises InvalidRequestError where it is malformed."""

    def __init__(self, origin: Origin) -> None:
        self._timeout_ms = call_options_of(origin.metadata).first_token_timeout_ms
        self._arrived = origin.arrived

    @property
    def left_ms(self) -> int | None:
        """What is left of it, None where there is none; raises DeadlineError once it has passed."""
        if self._timeout_ms is None:
            return None
        left_s = self._left_s()
        if left_s <= 0:
            raise self._passed()
        return max(1, int(1000 * left_s))

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Ends what the block waits for with DeadlineError where the first token is not there in time."""
        left_ms = self.left_ms
        timeout = asyncio.timeout(None if left_ms is None else left_ms / 1000)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._passed() from None
        except DeadlineError:
            # The predictor keeps the same deadline, and may be the first to see it pass.
            if self._timeout_ms is None or self._left_s() > _MARGIN_S:
                raise
            raise self._passed() from None

    async def bound(self, answers: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """The answers, the first of which must come in time."""
        try:
            async with self.in_time():
                first = await anext(answers)
        except StopAsyncIteration:
            return
        yield first
        async for answer in answers:
            yield answer

    def _left_s(self) -> float:
        return (self._timeout_ms or 0) / 1000 - (time.monotonic() - self._arrived)

    def _passed(self) -> DeadlineError:
        return DeadlineError(f"no token within {self._timeout_ms} ms")
