"""Waits for conditions, never for time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object | Awaitable[object]], timeout_s: float = 20.0) -> None:
    """Returns once `condition()`, which may be a coroutine, holds; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    delay_s = 0.005
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 1.2, 0.1)  # Each check of a process costs it time.
