"""Calls that wait for a message and have no request in flight; decides which of them end.

There are two kinds: calls that may be idle, such as streams of requests and health watches, and calls whose only
message has not arrived yet. Each kind is bounded in total and for each caller, so a new call of one kind never ends a
call of the other. Above a caller's bound its longest idle call ends; above the total bound, the longest idle call of
the caller with most calls. So a caller never ends calls of a caller with fewer. Callers without a name (`caller_of` in
headrace/clients.py) are other services, and have no bound of their own.

A call also ends after its own idle timeout.

gRPC holds the parts of a message until it is complete, and does not say how many bytes that is. So while calls from
outside wait for a message, the growth of the process beyond the most that requests in flight have used counts as
theirs: above a limit, their share beyond it ends, those first that began to wait last, but none that a message may just
be reaching. The oldest calls stay, as many as cannot together hold more than the limit. Growth that stays when they
have ended is not theirs, and ends no more calls.

Owned by the event loop.
"""

import asyncio
import os
from collections.abc import ItemsView
from contextlib import suppress
from operator import itemgetter
from typing import Protocol

from headrace.errors import DeadlineError, HeadraceError, OverloadedError
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES, RETRY_AFTER_MS, ByteBudget, give_memory_back

_SWEEP_S = 1.0
_LOOK_S = 0.05  # Of memory.
_ARRIVAL_S = 0.5  # A message that has been arriving for a shorter time is most likely almost complete.
# A busy machine takes longer over each message, as it does over a look: so many times as long is believed, and four
# times as long as over the messages that have just arrived, because the first of many that arrive at once are fast.
_SLOWEST, _SLOWNESS_MEMORY = 8.0, 0.9
_GROWTH_BYTES = 16 * 1024 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Waiting(Protocol):
    """A call, equal only to itself; `end` removes it from here."""

    may_be_idle: bool  # As it is meant to be.
    may_arrive: bool  # Its next message is a stranger's.
    idle_limit_s: float

    @property
    def caller(self) -> str: ...

    def end(self, error: HeadraceError) -> None: ...


class IdleCalls:
    def __init__(self, most: int, most_of_one: int, max_unfinished: int, budget: ByteBudget) -> None:
        self._open = _Kind(most, most_of_one)
        self._unsent = _Kind(most, most_of_one)
        self._sweep: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._budget = budget
        self._max_unfinished = self._growth_limit = max_unfinished
        self._least: int | None = None  # Resident bytes, since calls from outside wait.
        self._charged = 0  # The most bytes in use since then: the allocator keeps pages of requests that ended.
        self._missing = 0  # Calls that are to end once they are old enough.
        self._evicted = 0  # Calls that ended since memory was last below its limit.
        self._slowness = 1.0  # Of the latest looks and messages: their time, in multiples of what it should be.
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._open) + len(self._unsent)

    def add(self, call: Waiting) -> None:
        """Adds a call that starts to wait."""
        loop = asyncio.get_running_loop()
        surplus = (self._open if call.may_be_idle else self._unsent).add(call, loop.time())
        if surplus is not None:
            surplus.end(
                OverloadedError(
                    "too many idle calls are open; close those that are not in use", retry_after_ms=RETRY_AFTER_MS
                )
            )
        if self._sweep is None:
            self._sweep = loop.call_later(_SWEEP_S, self._end_overdue)
        if self._look is None and call.may_arrive:
            self._look_later(loop)

    def discard(self, call: Waiting) -> None:
        (self._open if call.may_be_idle else self._unsent).discard(call)

    def arrived(self, call: Waiting) -> None:
        """The call's message is complete."""
        since = self._unsent.since(call)
        if since is not None:
            slowness = 4 * (asyncio.get_running_loop().time() - since) / _ARRIVAL_S
            self._slowness = min(_SLOWEST, max(self._slowness, slowness))

    def _all(self) -> tuple[tuple[Waiting, float], ...]:
        """Each with the time since when it waits."""
        return (*self._open.items(), *self._unsent.items())

    def _end_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._sweep = loop.time(), None
        for call, since in self._all():
            if now - since >= call.idle_limit_s:
                call.end(DeadlineError(f"the call was idle for {call.idle_limit_s:g} s; make a new one"))
        if len(self):
            self._sweep = loop.call_later(_SWEEP_S, self._end_overdue)

    def _look_at_memory(self) -> None:
        loop, self._look = asyncio.get_running_loop(), None
        slowness = (loop.time() - self._looked) / _LOOK_S
        self._slowness = min(_SLOWEST, max(1.0, slowness, _SLOWNESS_MEMORY * self._slowness))
        if not any(call.may_arrive for kind in (self._open, self._unsent) for call, _ in kind.items()):
            self._least, self._charged, self._growth_limit = None, 0, self._max_unfinished
            self._evicted = self._missing = 0
            return
        resident = resident_bytes()
        self._least = resident if self._least is None else min(self._least, resident)
        self._charged = max(self._charged, self._budget.in_use)
        grown = resident - self._least - self._charged
        if grown > self._growth_limit:
            self._evict(1 - self._max_unfinished / grown, loop.time() - _ARRIVAL_S * self._slowness)
            if self._evicted:
                if not self._missing:
                    self._growth_limit = grown + _GROWTH_BYTES  # Their memory is not free at once.
                loop.run_in_executor(None, give_memory_back)
        elif grown <= self._max_unfinished:
            self._growth_limit, self._evicted, self._missing = self._max_unfinished, 0, 0
        self._look_later(loop)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looked = loop.time()
        self._look = loop.call_later(_LOOK_S, self._look_at_memory)

    def _evict(self, share: float, idle_before: float) -> None:
        """Ends a share of the calls, as far as they have waited since before; the rest of it is for the next look."""
        arriving = sorted(((since, call) for call, since in self._all() if call.may_arrive), key=itemgetter(0))
        count = self._missing or max(1 + int(len(arriving) * share), 2 * self._evicted)
        old = [call for since, call in arriving if since <= idle_before]
        suspects = old[self._max_unfinished // MAX_MESSAGE_BYTES :][::-1]
        error = OverloadedError(
            "incomplete messages take all the memory that they may; retry later", retry_after_ms=RETRY_AFTER_MS
        )
        for call in suspects[:count]:
            call.end(error)
        self._evicted = min(count, len(suspects))
        self._missing = count - self._evicted if self._evicted and count > len(old) else 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 where it is unknown. Source: Linux, /proc/self/statm."""
    with suppress(OSError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
    return 0


class _Kind:
    """The calls of one kind, those first that have been idle for longest."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = min(most, most_of_one)
        self._since: dict[Waiting, float] = {}
        self._of: dict[str, dict[Waiting, float]] = {}  # By caller.

    def __len__(self) -> int:
        return len(self._since)

    def items(self) -> ItemsView[Waiting, float]:
        return self._since.items()

    def since(self, call: Waiting) -> float | None:
        return self._since.get(call)

    def add(self, call: Waiting, now: float) -> Waiting | None:
        """Returns the call that has to end for it, if one has to."""
        self._since[call] = now
        own = self._of.setdefault(call.caller, {})
        own[call] = now
        if call.caller and len(own) > self._most_of_one:
            return next(iter(own))
        if len(self._since) > self._most:
            # Of the caller with most calls; of two such, the one whose first call has waited for longer.
            most = max(len(calls) for calls in self._of.values())
            firsts = (next(iter(calls)) for calls in self._of.values() if len(calls) == most)
            return min(firsts, key=self._since.__getitem__)
        return None

    def discard(self, call: Waiting) -> None:
        if self._since.pop(call, None) is not None:
            own = self._of[call.caller]
            del own[call]
            if not own:
                del self._of[call.caller]
