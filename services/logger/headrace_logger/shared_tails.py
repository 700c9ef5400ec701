"""Tails of a database that other loggers write to too: they show what the database has, not what this logger commits.

`follow` reads the new records of all loggers while a tail is open; its own logger's commits wake it, those of others it
finds within half a second. A new tail may begin with the records of the half second before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from headrace.errors import NotReadyError
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos.headrace_pb2 import PayloadRecord

_POLL_S = 0.5
_PAGE = 64


class SharedTails(Tails):
    """See the module."""

    def show(self, records: Sequence[PayloadRecord]) -> None:
        """Nothing: `follow` will find them."""

    async def follow(self, store: Store) -> None:
        """Shows the new records, until cancelled; waits while the store does not answer."""
        news = asyncio.Event()
        store.on_append(news.set)
        position: int | None = None
        while True:
            news.clear()
            with suppress(NotReadyError):
                position = await self._show_after(store, position)
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _POLL_S)
            if not len(self):
                await asyncio.sleep(_POLL_S)  # Nobody waits for a commit's records.

    async def _show_after(self, store: Store, position: int | None) -> int:
        """Shows all records after a position; returns that of the last one."""
        if position is None or not len(self):
            newest = await store.newest_position()
            # A tail that was opened meanwhile begins at the position before.
            return newest if position is None or not len(self) else position
        while page := await store.shown_after(position, _PAGE):
            super().show([stored.record for stored in page])
            position = page[-1].position
        return position
