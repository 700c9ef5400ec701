"""Threads that read and write large bodies, so that the event loop goes on meanwhile.

What is small runs at once, for a change of threads costs more. Bodies that wait or are worked on are
bounded together, in bytes: beyond that, OverloadedError. A wait ends with the request's deadline.

Parsing JSON is one call that holds the interpreter, some 7 ms a megabyte, on whatever thread it runs; all
other work comes in slices. Binary tensors have none of this.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from millrace.errors import DeadlineError, OverloadedError

SMALL_BYTES = 32 * 1024  # Read in less than a millisecond.
_THREADS = 2
_MAX_BYTES = 1024**3
_RETRY_AFTER_MS = 1000

T = TypeVar("T")


class BodyThreads:
    """Called by one event loop."""

    def __init__(self, threads: int = _THREADS, max_bytes: int = _MAX_BYTES) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rest-body")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes = 0

    async def run(self, size: int, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """The result of `work` on a body of `size` bytes."""
        if size <= SMALL_BYTES:
            return work()
        with self._lock:
            if self._bytes + size > self._max_bytes:
                raise OverloadedError("too many large bodies at a time", retry_after_ms=_RETRY_AFTER_MS)
            self._bytes += size

        def done(_: Future[Any]) -> None:
            with self._lock:
                self._bytes -= size

        future = self._pool.submit(work)
        future.add_done_callback(done)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlineError("the deadline passed while the body was read or written") from None

    async def close(self) -> None:
        """Work that has not begun is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
