"""The deadline of a request: one value from its arrival to the last call made for it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.errors import DeadlineError

PASSED = "the deadline passed"
# A caller's deadline passes before the server's, by the time that the request travelled (up to 0.1 s on a busy
# machine): a cancellation so shortly before the deadline is treated as the deadline.
DEADLINE_MARGIN_S = 0.25
_APART_S = 0.01  # Clocks of two services.


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is a time of the monotonic clock, in seconds; infinity: no deadline. `message` is of its error."""

    at: float = math.inf
    message: str = PASSED

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """The deadline in `timeout_s` seconds; None: no deadline."""
        return cls() if timeout_s is None else cls(time.monotonic() + timeout_s)

    def left(self, message: str = "") -> float | None:
        """The remaining seconds, None without a deadline; raises DeadlineError if it has passed."""
        if self.at == math.inf:
            return None
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(message or self.message)
        return left_s

    def passed(self, margin_s: float = 0.0) -> bool:
        """Whether it has passed, or will have within the margin."""
        return time.monotonic() >= self.at - margin_s

    @asynccontextmanager
    async def scope(self, message: str = "") -> AsyncIterator[None]:
        """Ends the block with DeadlineError when the deadline passes.

        An error of the same deadline as another service keeps it, which may be the first to see it pass, becomes this.
        """
        timeout = asyncio.timeout(self.left(message))
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineError(message or self.message) from None
        except DeadlineError:
            if not self.passed(_APART_S):
                raise
            raise DeadlineError(message or self.message) from None


NO_DEADLINE = Deadline()
