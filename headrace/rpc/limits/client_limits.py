"""The limits of a client's key (headrace/clients.py): requests in flight, in a second and in a minute.

Each process of a service has its own counts. Windows slide: any 60 s in a row have at most the limit of a minute. The
remaining requests are in headers with the names and durations of OpenAI's API: x-ratelimit-remaining-requests, 6m0s.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.clients import Client
from headrace.errors import OverloadedError

_SLOTS = 61  # Seconds, the one that has begun among them.
_RETRY_AFTER_MS = 1000
_MAX_CLIENTS = 1000

Pairs = tuple[tuple[str, str], ...]  # Metadata.
T = TypeVar("T")


class ByClient(Generic[T]):
    """Values by client name. Beyond 1000 clients, those whose values `matters` rejects are dropped.

    Owned by the event loop.
    """

    def __init__(self, make: Callable[[], T], matters: Callable[[T], bool]) -> None:
        self._make = make
        self._matters = matters
        self._values: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, name: str) -> T:
        """The client's value, which is made if there is none."""
        value = self._values.get(name)
        if value is None:
            if len(self._values) >= _MAX_CLIENTS:
                self._values = {name: value for name, value in self._values.items() if self._matters(value)}
            value = self._values[name] = self._make()
        return value


class SlidingMinute:
    """Amounts of the last minute, by seconds."""

    def __init__(self) -> None:
        self._slots = [0] * _SLOTS
        self._second = 0  # The latest that has a slot.
        self.used = 0

    def advance(self, now: float) -> None:
        """Drops amounts older than a minute; `now` never decreases."""
        second = int(now)
        for old in range(self._second + 1, min(second, self._second + _SLOTS) + 1):
            self.used -= self._slots[old % _SLOTS]
            self._slots[old % _SLOTS] = 0
        self._second = max(second, self._second)

    def add(self, amount: int, second: int | None = None) -> int:
        """Adds to the present second, or to an earlier one if it is remembered; returns the second."""
        at = self._second if second is None else second
        if self._second - _SLOTS < at <= self._second:
            self._slots[at % _SLOTS] += amount
            self.used += amount
        return at

    def wait_s(self, amount: int, limit: int) -> float:
        """Seconds until `amount` more fits, if nothing else is added."""
        left = self.used + amount - limit
        for age in range(_SLOTS):
            if left <= 0:
                return age
            left -= self._slots[(self._second + 1 + age) % _SLOTS]
        return _SLOTS

    def remaining(self, kind: str, limit: int) -> Pairs:
        """Headers with a limit, its remaining amount and the time until it is full again; `kind` ends their names."""
        minutes, seconds = divmod(int(self.wait_s(limit, limit)), 60)
        return (
            (f"x-ratelimit-limit-{kind}", str(limit)),
            (f"x-ratelimit-remaining-{kind}", str(max(0, limit - self.used))),
            (f"x-ratelimit-reset-{kind}", f"{minutes}m{seconds}s" if minutes else f"{seconds}s"),
        )


@dataclass
class _Usage:
    in_flight: int = 0
    latest: deque[float] = field(default_factory=deque)  # When they began: as many as a second may have.
    requests: SlidingMinute = field(default_factory=SlidingMinute)

    def limits(self, now: float) -> bool:
        """Whether any of it limits the next request."""
        self.requests.advance(now)
        return bool(self.in_flight or self.requests.used or (self.latest and now - self.latest[-1] < 1))


class ClientLimits:
    """Requests in flight, in a second and in a minute, by client. Owned by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients = ByClient(_Usage, lambda usage: usage.limits(clock()))
        self._others: list[Callable[[Client], Pairs]] = []

    def add(self, remaining: Callable[[Client], Pairs]) -> None:
        """Adds the headers of another limit, which is counted elsewhere in the process, to those of `remaining`."""
        self._others.append(remaining)

    def remaining(self, client: Client) -> Pairs:
        """Headers with the client's remaining requests and other limits for this minute."""
        headers: Pairs = ()
        limit = client.policy.requests_per_minute
        if limit is not None:
            requests = self._clients[client.name].requests
            requests.advance(self._clock())
            headers = requests.remaining("requests", limit)
        for other in self._others:
            headers += other(client)
        return headers

    def begin(self, client: Client) -> None:
        """Counts one more request in flight; raises OverloadedError beyond a limit."""
        policy, usage = client.policy, self._clients[client.name]
        if policy.streams is not None and usage.in_flight >= policy.streams:
            raise OverloadedError(
                f"{client.name} has {usage.in_flight} requests in flight, its key allows no more",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        now = self._clock()
        if policy.requests_per_second is not None:
            if usage.latest.maxlen != policy.requests_per_second:
                usage.latest = deque(usage.latest, policy.requests_per_second)
            if len(usage.latest) == policy.requests_per_second and (wait_s := usage.latest[0] + 1 - now) > 0:
                raise OverloadedError(
                    f"{client.name} has made the {policy.requests_per_second} requests that its key allows in a second",
                    retry_after_ms=math.ceil(1000 * wait_s),
                )
        if policy.requests_per_minute is not None:
            usage.requests.advance(now)
            if usage.requests.used >= policy.requests_per_minute:
                wait_s = usage.requests.wait_s(1, policy.requests_per_minute)
                raise OverloadedError(
                    f"{client.name} has made the {policy.requests_per_minute} requests that its key allows in a minute",
                    retry_after_ms=int(1000 * wait_s),
                )
            usage.requests.add(1)
        if policy.requests_per_second is not None:
            usage.latest.append(now)
        usage.in_flight += 1

    def finish(self, client: Client) -> None:
        """A request that `begin` counted has ended."""
        self._clients[client.name].in_flight -= 1
