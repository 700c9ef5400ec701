"""Limits the calls that read records, and the bytes of records that are being sent.

A record that is being sent stays in memory until the caller has read it, and gRPC cannot take it back. So a record of
more than `FREE_BYTES` is read from the store only under a loan: all loans together are bounded, and those of one caller
to half of that. Smaller records are bounded by the number of calls, which is bounded for each caller too. A caller that
gets no loan within a timeout gets OverloadedError.

    with readers.reader(caller_of(context)) as reader:
        async with reader(size): ...   # read the records, write them

Owned by the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
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
        self._returned = asyncio.Event()

    @property
    def lent_bytes(self) -> int:
        return self._lent.total()

    @contextmanager
    def reader(self, caller: str) -> Iterator[Reader]:
        """Registers a call of a caller that reads, which gets memory by `Reader`."""
        count, total = self._readers[caller], self._readers.total()
        if count >= self._max_of_one or total >= self._max_readers:
            # Without the number of other callers' calls, which is not public.
            most = f"at most {self._max_readers} may, {self._max_of_one} of one"
            message = f"too many calls read records, {count} of them of this caller; {most}"
            raise OverloadedError(message, retry_after_ms=COME_BACK_MS)
        self._readers[caller] += 1
        try:
            yield partial(self.lend, caller)
        finally:
            self._readers -= Counter([caller])  # Without callers that have none.

    @asynccontextmanager
    async def lend(self, caller: str, size: int) -> AsyncIterator[None]:
        """Lends bytes to a caller; a single loan of any size is always granted."""
        if size <= FREE_BYTES:
            yield
            return
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._has_room(caller, size):
                    self._returned.clear()
                    await self._returned.wait()
                self._lent[caller] += size
        except TimeoutError:
            message = "too many bytes of records wait to be read by their callers; read faster or retry later"
            raise OverloadedError(message, retry_after_ms=COME_BACK_MS) from None
        try:
            yield
        finally:
            self._lent -= Counter({caller: size})
            self._returned.set()

    def _has_room(self, caller: str, size: int) -> bool:
        lent, own = self.lent_bytes, self._lent[caller]
        return (own == 0 or own + size <= self._max_bytes // 2) and (lent == 0 or lent + size <= self._max_bytes)


def caller_of(context: Context) -> str:
    """Identifies the caller, by the peer's address where the call has not come through the gateway."""
    return clients.caller_of(call_metadata(context)) or context.peer().rpartition(":")[0]
