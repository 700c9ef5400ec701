"""Retention: deletes records above an age, and more of them, oldest first, while the database is above a size.

Above the size, refused requests are deleted first if they take more than an eighth of it, then the oldest records of
the client that uses most space: see `store.shares.expire_some`.

Records that a sink has not confirmed are deleted too; a warning has their number. The received sequences of a source
and the ids of deleted calls are kept for as long as a spool might send them again. The sums of usage have an age of
their own.

One task on the event loop, owned by the caller of `run`; deletions run on the store's writer thread.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.errors import NotReadyError
from headrace_logger.store.store import Store
from headrace_logger.store.tables import now_us

logger = logging.getLogger(__name__)

_ROUND_S = 10.0
_DAY_US = 24 * 3600 * 1_000_000
_REMEMBERED_US = 30 * _DAY_US


class Retention:
    """Keeps a store below an age in days (0: no limit) and a size in bytes; `sinks` are names of cursors.

    `usage_days` is the age of the sums of usage (0: no limit).
    """

    def __init__(
        self,
        store: Store,
        days: float,
        max_bytes: int,
        sinks: Sequence[str] = (),
        now_us: Callable[[], int] = now_us,
        usage_days: float = 0,
    ) -> None:
        self._store = store
        self._age_us = int(days * _DAY_US)
        self._max_bytes = max_bytes
        self._sinks = sinks
        self._now_us = now_us
        self._usage_us = int(usage_days * _DAY_US)

    async def run(self) -> None:
        """Applies the limits every ten seconds, until cancelled; retries while the store does not answer."""
        while True:
            try:
                await self.apply()
            except NotReadyError:
                logger.warning("old records could not be deleted; trying again")
            await asyncio.sleep(_ROUND_S)

    async def apply(self) -> int:
        """Deletes the records above the limits; returns their number; raises NotReadyError."""
        now = self._now_us()
        before_us = now - self._age_us if self._age_us else None
        cursors = await self._store.cursors()
        sent = min((cursors[name] for name in self._sinks if name in cursors), default=None)
        expired = unsent = 0
        try:
            while positions := await self._store.expire(before_us, self._max_bytes):
                expired += len(positions)
                unsent += sum(position > sent for position in positions) if sent is not None else 0
        finally:
            if expired:
                logger.info("%d records were deleted for their age or for space", expired)
            if unsent:
                logger.warning("%d deleted records were not confirmed by every sink", unsent)
        await self._store.forget(now - max(self._age_us, _REMEMBERED_US))
        if self._usage_us:
            await self._store.forget_usage(now - self._usage_us)
        await self._store.database.give_back()
        return expired
