"""Blocking calls of a user's code on a few threads, with a bounded queue before them, in which callers have turns."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.errors import OverloadedError
from headrace.rpc.limits.admission import caller_of_call
from headrace.threads import FairThreads

T = TypeVar("T")

_RETRY_AFTER_MS = 100


class WorkPool:
    """Used by one event loop. A call whose caller leaves runs to its end, because a thread cannot be stopped."""

    def __init__(self, threads: int, max_waiting: int, name: str) -> None:
        self._threads = FairThreads(threads, threads + max_waiting, name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result; raises OverloadedError where too many calls wait already."""
        future = self._threads.submit(caller_of_call(), contextvars.copy_context().run, function, *arguments)
        if future is None:
            raise OverloadedError("too many requests wait for a thread; retry later", retry_after_ms=_RETRY_AFTER_MS)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Takes no more calls; does not wait for those that run."""
        self._threads.close()
