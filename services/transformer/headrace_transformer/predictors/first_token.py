"""The first-token deadline: `x-first-token-timeout-ms`, the maximum time until an answer begins.

It starts at the request's arrival, includes every wait for a predictor, and is separate from the request's deadline.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.deadline import Deadline
from headrace.errors import DeadlineError
from headrace.rpc.server.call_context import CallContext, first_token_timeout_s

_MARGIN_S = 0.01


class FirstToken:
    """One request's first-token deadline, if it has one; raises InvalidRequestError where it is malformed."""

    def __init__(self, call: CallContext) -> None:
        timeout_s = first_token_timeout_s(call.metadata)
        self._deadline = Deadline(math.inf if timeout_s is None else call.arrived + timeout_s)
        self._message = f"no token within {1000 * (timeout_s or 0):.0f} ms"

    @property
    def left_s(self) -> float | None:
        """What is left of it, None where there is none; raises DeadlineError once it has passed."""
        return self._deadline.left(self._message)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Ends the block with DeadlineError if the first token is late."""
        try:
            async with self._deadline.scope(self._message):
                yield
        except DeadlineError:
            # The predictor keeps the same deadline, and may be the first to see it pass.
            if not self._deadline.passed(_MARGIN_S):
                raise
            raise DeadlineError(self._message) from None
