"""A bound on the memory of large requests in flight, for one process.

A request is charged with its copies: what gRPC receives, what the parser makes of it, what goes to the next hop and
what comes back. Small requests are not charged, to save time; the limit on concurrent calls (`Admission`) covers them.
After large releases the allocator returns free pages to the machine.
"""

import asyncio
import ctypes
from collections import deque

from headrace.errors import OverloadedError, TooLargeError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # Above Envoy's 60 MiB, so that the gateway answers first.
MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
SMALL_BYTES = 16 * 1024  # A message up to this size is not charged, and its fields are not counted before it is parsed.
COPIES = 4
DEFAULT_BYTES = 768 * 1024 * 1024
RETRY_AFTER_MS = 1000
_WAIT_S = 30.0
_TRIM_BYTES = 16 * 1024 * 1024
_TRIM_DELAY_S = 3.0  # A wait: the next large request reuses the free pages.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it.


class ByteBudget:
    """Used on the event loop only. Release exactly the sizes that were reserved."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self.in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_bytes = 0
        self._untrimmed = 0
        self._trim: asyncio.TimerHandle | None = None
        self._trim_at = 0.0

    def reserve(self, size: int) -> None:
        """Takes `size` bytes, before waiting requests; raises TooLargeError, or OverloadedError if there is no room."""
        self._check(size)
        if self.in_use + size > self._limit:
            raise self._full()
        self.in_use += size

    async def reserve_in_turn(self, size: int) -> None:
        """As `reserve`, but first come, first served: waits for up to 30 s.

        Raises OverloadedError at once if the requests that wait would together want more than a quarter of the budget.
        """
        self._check(size)
        if not self._waiting and self.in_use + size <= self._limit:
            self.in_use += size
            return
        if self._waiting_bytes + size > self._limit // 4:
            raise self._full()
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
                raise self._full() from None
            raise

    def release(self, size: int) -> None:
        self.in_use -= size
        self._next_turns()
        self._untrimmed += size
        if self._untrimmed >= _TRIM_BYTES:
            loop = asyncio.get_running_loop()
            self._trim_at = loop.time() + _TRIM_DELAY_S
            if self._trim is None:
                self._trim = loop.call_at(self._trim_at, self._start_trim)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise TooLargeError(
                f"the request takes {size >> 20} MiB of memory with its copies, more than the {self._limit >> 20} MiB"
                " for all requests"
            )

    def _full(self) -> OverloadedError:
        message = (
            f"requests in flight use the {self._limit >> 20} MiB of memory that *_REQUEST_MEMORY allows; retry later"
        )
        return OverloadedError(message, retry_after_ms=RETRY_AFTER_MS)

    def _next_turns(self) -> None:
        while self._waiting and self.in_use + self._waiting[0][0] <= self._limit:
            size, turn = self._waiting.popleft()
            self._waiting_bytes -= size
            if not turn.done():
                self.in_use += size
                turn.set_result(None)

    def _start_trim(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._trim_at:  # Large requests have ended since.
            self._trim = loop.call_at(self._trim_at, self._start_trim)
            return
        self._trim, self._untrimmed = None, 0
        loop.run_in_executor(None, give_memory_back)


def give_memory_back() -> None:
    """Returns the allocator's free pages to the machine; blocks for milliseconds, without the interpreter lock."""
    if _malloc_trim is not None:
        _malloc_trim(0)
