"""A bound on the memory of large requests in flight, for one process.

A request is charged with its copies: what gRPC receives, what the parser makes of it, what goes on to the next hop and
what comes back. Small requests are not charged, so that they cost nothing here; the bound on calls bounds them.
After much has been released, the allocator gives free pages back to the machine.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque

from millrace.errors import OverloadedError, TooLargeError

SMALL_BYTES = 16 * 1024  # A message up to this size is not charged, and its fields are not counted before it is parsed.
COPIES = 4
DEFAULT_BYTES = 768 * 1024 * 1024
RETRY_AFTER_MS = 1000
_WAIT_S = 30.0
_TRIM_BYTES = 16 * 1024 * 1024
_TRIM_DELAY_S = 3.0  # After the last large request: the next one would have to get its pages from the machine anew.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone keeps them.


class ByteBudget:
    """Owned by the event loop. Bytes that are reserved are released by the same number."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self._in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_bytes = 0
        self._untrimmed = 0
        self._trim: asyncio.TimerHandle | None = None
        self._trim_at = 0.0

    @property
    def in_use(self) -> int:
        """Bytes that are reserved now."""
        return self._in_use

    def reserve(self, size: int) -> None:
        """Takes `size` bytes; raises TooLargeError where they can never fit, OverloadedError where they do not now."""
        self._check(size)
        if self._in_use + size > self._limit:
            raise _full()
        self._in_use += size

    async def reserve_in_turn(self, size: int) -> None:
        """As `reserve`, but waits for others to release; those that wait hold a quarter of the budget at most."""
        self._check(size)
        if not self._waiting and self._in_use + size <= self._limit:
            self._in_use += size
            return
        if self._waiting_bytes + size > self._limit // 4:
            raise _full()
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(size)  # Its turn came as the wait ended.
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._waiting_bytes -= size
                self._next_turns()
            if isinstance(error, TimeoutError):
                raise _full() from None
            raise

    def release(self, size: int) -> None:
        """Gives back what was reserved."""
        self._in_use -= size
        self._next_turns()
        self._untrimmed += size
        if self._untrimmed >= _TRIM_BYTES:
            self._trim_at = asyncio.get_running_loop().time() + _TRIM_DELAY_S
            if self._trim is None:
                self.trim_after(_TRIM_DELAY_S)

    def trim_after(self, delay_s: float) -> None:
        """Has the allocator give free pages back so much later; what was to do so before or after that does not."""
        loop = asyncio.get_running_loop()
        if self._trim is not None:
            self._trim.cancel()
        self._trim_at = loop.time() + delay_s
        self._trim = loop.call_at(self._trim_at, self._start_trim)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise TooLargeError(
                f"the request takes {size >> 20} MiB of memory with its copies, more than the {self._limit >> 20} MiB"
                " for all requests"
            )

    def _next_turns(self) -> None:
        while self._waiting and self._in_use + self._waiting[0][0] <= self._limit:
            size, turn = self._waiting.popleft()
            self._waiting_bytes -= size
            if not turn.done():
                self._in_use += size
                turn.set_result(None)

    def _start_trim(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._trim_at:  # Large requests have ended since.
            self._trim = loop.call_at(self._trim_at, self._start_trim)
            return
        self._trim, self._untrimmed = None, 0
        loop.run_in_executor(None, give_memory_back)


def give_memory_back() -> None:
    """Returns the allocator's free pages to the machine; blocks for some milliseconds, without the interpreter."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _full() -> OverloadedError:
    return OverloadedError("the requests in flight take all the memory that they may", retry_after_ms=RETRY_AFTER_MS)
