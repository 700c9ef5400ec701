"""Tokens by client, in a minute: a request reserves its prompt and max_tokens, and settles at its end.

So generations that run at the same time cannot exceed the limit together. A cancelled one is charged for its prompt and
what it had generated, and for nothing before its first token. The counts are those of one process.

A month is a calendar month in UTC, by the payload log. The figure is read again once a minute, by the first generation
that needs it; until then the tokens that this process has used since are added. While the logger is unreachable,
generations are served: the log never fails a request.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.clients import Client
from headrace.errors import HeadraceError, InvalidRequestError, OverloadedError
from headrace.rpc.limits.client_limits import ByClient, Pairs, SlidingMinute
from headrace_protos.headrace_pb2 import UsageRequest

logger = logging.getLogger(__name__)

READ_AGAIN_S = 60.0
_TIMEOUT_S = 1.0
_MAX_CLIENTS = 1000

UsedTokens = Callable[[str, datetime], Awaitable[int]]


class MonthUsedError(OverloadedError):
    """A client has used the tokens of its month."""


class Reservation(AbstractContextManager["Reservation"]):
    """The tokens of one request, until the block ends; the owner keeps `used`, what comes to its prompt, up to date."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self.used = 0
        self._settle = settle

    def __exit__(self, *_: object) -> None:
        self._settle(self.used)


class TokenQuota:
    """Owned by the event loop; one for all generations."""

    def __init__(self, month: "MonthBudget | None" = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._month = month
        self._clock = clock
        self._minutes = ByClient(SlidingMinute, self._is_used)

    async def check(self, client: Client) -> None:
        """Raises OverloadedError where the client has used the tokens of its month."""
        if self._month is not None:
            await self._month.check(client)

    async def charged(self, client: Client, prompt_tokens: int, max_tokens: int = 0) -> Reservation:
        """As `reserved`, after `check`."""
        await self.check(client)
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

        def settle(used: int) -> None:
            if self._month is not None:
                self._month.add(client, prompt_tokens + used)
            if minute is not None:
                minute.advance(self._clock())
                minute.add(prompt_tokens + used - wanted, second)

        return Reservation(settle)


@dataclass
class _Known:
    month: datetime
    used: int = 0
    read_at: float = -READ_AGAIN_S
    is_being_read: bool = False


class MonthBudget:
    """Owned by the event loop. `used_tokens` returns a client's tokens since a time."""

    def __init__(
        self,
        used_tokens: UsedTokens,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used_tokens = used_tokens
        self._now = now
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def check(self, client: Client) -> None:
        """Raises OverloadedError where the client has used the tokens of its month."""
        limit = client.policy.tokens_per_month
        if limit is None:
            return
        month = self._now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        known = self._known.get(client.name)
        if known is None or known.month != month:
            if len(self._known) >= _MAX_CLIENTS:
                self._known.pop(next(iter(self._known)))
            known = self._known[client.name] = _Known(month)
        if not known.is_being_read and self._clock() - known.read_at >= READ_AGAIN_S:
            await self._read(client.name, known)
        if known.used >= limit:
            ends = (month + timedelta(days=32)).replace(day=1)
            raise MonthUsedError(
                f"{client.name} has used the {limit} tokens that its key allows in a month",
                retry_after_ms=int((ends - self._now()).total_seconds() * 1000),
            )

    def add(self, client: Client, tokens: int) -> None:
        """Adds the tokens of a generation, until the next read of the log includes them."""
        known = self._known.get(client.name)
        if known is not None:
            known.used += tokens

    async def _read(self, name: str, known: _Known) -> None:
        known.is_being_read = True
        try:
            known.used = await self._used_tokens(name, known.month)
        except HeadraceError as error:
            logger.warning("tokens of %s in this month are unknown: %s", name, error.message)
        finally:
            known.is_being_read = False
            known.read_at = self._clock()


def used_by_log(log: Any) -> UsedTokens:
    """Reads the logger's counts; `log` is a PayloadLogStub."""

    async def used_tokens(client: str, since: datetime) -> int:
        start = Timestamp()
        start.FromDatetime(since)
        answer = await log.Usage(UsageRequest(since=start, client=client, group=""), timeout=_TIMEOUT_S)
        return sum(group.prompt_tokens + group.completion_tokens for group in answer.groups)

    return used_tokens
