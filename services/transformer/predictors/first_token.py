"""The first-token deadline: `x-first-token-timeout-ms`, what a caller allows until its answer begins.

Counted from the request's arrival, through every wait for a predictor, and apart from the deadline of the whole.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millrace.deadline import Deadline
from millrace.errors import DeadlineError
from millrace.oip.resumable import call_options_of
from millrace.rpc.call_context import CallContext

_MARGIN_S = 0.01


class FirstToken:
    """One request's first-token deadline, if it has one; raises InvalidRequestError where it is malformed."""

    def __init__(self, call: CallContext) -> None:
        timeout_ms = call_options_of(call.metadata).first_token_timeout_ms
        self._deadline = Deadline(math.inf if timeout_ms is None else call.arrived + timeout_ms / 1000)
        self._message = f"no token within {timeout_ms} ms"

    @property
    def left_ms(self) -> int | None:
        """What is left of it, None where there is none; raises DeadlineError once it has passed."""
        left_s = self._deadline.left(self._message)
        return None if left_s is None else max(1, int(1000 * left_s))

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Ends what the block waits for with DeadlineError where the first token is not there in time."""
        try:
            async with self._deadline.scope(self._message):
                yield
        except DeadlineError:
            # The predictor keeps the same deadline, and may be the first to see it pass.
            if not self._deadline.passed(_MARGIN_S):
                raise
            raise DeadlineError(self._message) from None
