"""Blocking calls of a user's code on a few threads, with a bounded queue before them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from millrace.errors import OverloadedError

T = TypeVar("T")

_RETRY_AFTER_MS = 100


class WorkPool:
    """Used by one event loop. A call whose caller leaves runs to its end, because a thread cannot be stopped."""

    def __init__(self, threads: int, max_waiting: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._limit = threads + max_waiting
        self._held = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result; raises OverloadedError where too many calls wait already."""
        if self._held >= self._limit:
            raise OverloadedError("too many requests wait for a thread; retry later", retry_after_ms=_RETRY_AFTER_MS)
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        future = self._executor.submit(partial(context.run, function, *arguments))
        self._held += 1

        def leave(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _leave(self) -> None:
        self._held -= 1

    def close(self) -> None:
        """Takes no more calls; does not wait for those that run."""
        self._executor.shutdown(wait=False, cancel_futures=True)
