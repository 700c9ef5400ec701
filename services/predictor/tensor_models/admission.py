"""Limits how many requests of a model run at the same time, and how many wait."""

from __future__ import annotations

import asyncio

from millrace.errors import OverloadedError


class Admission:
    """Belongs to one event loop; waiting requests are admitted in order of arrival."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def enter(self, retry_after_ms: int) -> None:
        """Waits for a slot, which `leave` frees; raises OverloadedError if too many wait."""
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise OverloadedError("the queue is full", retry_after_ms=retry_after_ms)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        self._slots.release()
