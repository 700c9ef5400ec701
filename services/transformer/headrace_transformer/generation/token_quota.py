"""Tokens by client, in a minute: a request reserves its prompt and max_tokens, and settles at its end.

So generations that run at the same time cannot exceed the limit together. A cancelled one is charged for its prompt and
what it had generated. The counts are those of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from headrace.clients import Client
from headrace.errors import InvalidRequestError, OverloadedError
from headrace.rpc.limits.client_limits import ByClient, SlidingMinute
from headrace.rpc.limits.response_head import Pairs
from headrace_transformer.generation.month_budget import MonthBudget


class Reservation(AbstractContextManager["Reservation"]):
    """The tokens of one request, until the block ends; the owner keeps `generated` up to date."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self.generated = 0
        self._settle = settle

    def __exit__(self, *_: object) -> None:
        self._settle(self.generated)


class TokenQuota:
    """Owned by the event loop; one for all generations."""

    def __init__(self, month: MonthBudget | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._month = month
        self._clock = clock
        self._minutes = ByClient(SlidingMinute, self._is_used)

    async def charged(self, client: Client, prompt_tokens: int, max_tokens: int = 0) -> Reservation:
        """As `reserved`; raises OverloadedError too where the client has used the tokens of its month."""
        if self._month is not None:
            await self._month.check(client)
        return self.reserved(client, prompt_tokens, max_tokens)

    def remaining(self, client: Client) -> Pairs:
        """Headers with the remaining tokens of a client's minute, without reserved ones; none without a limit."""
        limit = client.policy.tokens_per_minute
        if limit is None:
            return ()
        minute = self._minutes[client.name]
        minute.advance(self._clock())
        return minute.remaining("tokens", limit)

    def _is_used(self, minute: SlidingMinute) -> bool:
        minute.advance(self._clock())
        return minute.used > 0

    def reserved(self, client: Client, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Holds the tokens of a request.

        Raises OverloadedError if the client has to wait, and InvalidRequestError if it asks for more than its key
        allows in a minute.
        """
        wanted, limit, minute, second = prompt_tokens + max_tokens, client.policy.tokens_per_minute, None, 0
        if limit is not None:
            if wanted > limit:
                raise InvalidRequestError(
                    f"the request takes up to {wanted} tokens, the key of {client.name} allows {limit} in a minute",
                    param="max_tokens",
                )
            minute = self._minutes[client.name]
            minute.advance(self._clock())
            if minute.used + wanted > limit:
                left = max(0, limit - minute.used)
                raise OverloadedError(
                    f"the request takes up to {wanted} tokens, of {limit} a minute {client.name} has {left} left",
                    retry_after_ms=int(1000 * minute.wait_s(wanted, limit)),
                )
            second = minute.add(wanted)

        def settle(generated: int) -> None:
            if self._month is not None:
                self._month.add(client, prompt_tokens + generated)
            if minute is not None:
                minute.advance(self._clock())
                minute.add(prompt_tokens + generated - wanted, second)

        return Reservation(settle)
