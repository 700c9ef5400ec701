"""Limits the calls that read records, and the bytes of records that are being sent.

A record that is being sent stays in memory until the caller has read it, and gRPC cannot take it back. So a record of
more than `FREE_BYTES` is read from the store only under a loan: all loans together are bounded, and those of one caller
to half of that. Smaller records are bounded by the number of calls, which is bounded for each caller too. A caller that
gets no loan within a timeout gets OverloadedError.

    with readers.reader(caller_of(context)) as reader:
        async with reader(size): ...   # read the records, write them

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from headrace import clients
from headrace.errors import OverloadedError
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata

FREE_BYTES = 64 * 1024
MAX_BYTES = 64 * 1024 * 1024
MAX_READERS, MAX_READERS_OF_ONE = 128, 48
COME_BACK_MS = 1000
_WAIT_S = 10.0

# Lends memory for so many bytes of records until the block ends.
Reader = Callable[[int], AbstractAsyncContextManager[None]]


@dataclass(eq=False)
class _Waiting:
    caller: str
    size: int
    granted: asyncio.Future[None]


class Readers:
    """All open calls that read, and the bytes lent to them; `wait_s` is the timeout of a loan."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_readers: int = MAX_READERS,
        max_of_one: int = MAX_READERS_OF_ONE,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_readers = max_readers
        self._max_of_one = max_of_one
        self._wait_s = wait_s
        self._readers: Counter[str] = Counter()  # By caller, like the loans.
        self._lent: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    @property
    def lent_bytes(self) -> int:
        return self._lent.total()

    @contextmanager
    def reader(self, caller: str) -> Iterator[Reader]:
        """Registers a call of a caller that reads, which gets memory by `Reader`."""
        count, total = self._readers[caller], self._readers.total()
        if count >= self._max_of_one or total >= self._max_readers:
            # Without the number of other callers' calls, which is not public.
            message = f"too many calls read records, {count} of them of this caller; retry later"
            raise OverloadedError(message, retry_after_ms=COME_BACK_MS)
        self._readers[caller] += 1
        try:
            yield partial(self.lend, caller)
        finally:
            _subtract(self._readers, caller, 1)

    @asynccontextmanager
    async def lend(self, caller: str, size: int) -> AsyncIterator[None]:
        """Lends bytes to a caller; a single loan of any size is always granted."""
        if size <= FREE_BYTES:
            yield
            return
        await self._borrow(caller, size)
        try:
            yield
        finally:
            self._give_back(caller, size)

    async def _borrow(self, caller: str, size: int) -> None:
        if self._has_room(caller, size):
            self._lent[caller] += size
            return
        waiting = _Waiting(caller, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._give_back(caller, size)  # It was granted at the last moment.
            if isinstance(error, TimeoutError):
                message = "too many bytes of records wait to be read by their callers; read faster or retry later"
                raise OverloadedError(message, retry_after_ms=COME_BACK_MS) from None
            raise

    def _give_back(self, caller: str, size: int) -> None:
        _subtract(self._lent, caller, size)
        for waiting in tuple(self._waiting):
            # A cancelled one removes itself from the list when its task runs.
            if not waiting.granted.done() and self._has_room(waiting.caller, waiting.size):
                self._waiting.remove(waiting)
                self._lent[waiting.caller] += waiting.size
                waiting.granted.set_result(None)

    def _has_room(self, caller: str, size: int) -> bool:
        lent, own = self.lent_bytes, self._lent[caller]
        return (own == 0 or own + size <= self._max_bytes // 2) and (lent == 0 or lent + size <= self._max_bytes)


def caller_of(context: Context) -> str:
    """Identifies the caller, by the peer's address where the call has not come through the gateway."""
    return clients.caller_of(call_metadata(context)) or context.peer().rpartition(":")[0]


def _subtract(counter: Counter[str], key: str, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]
