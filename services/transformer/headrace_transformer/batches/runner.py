"""The Batch API of one transformer: its methods, and what runs the batches of the folder that no other process runs.

Each process looks for them once a second and takes the oldest, of each client a few at a time; they run below the
requests that arrive. A batch whose process ends is taken by another one, since its lock is free then.
"""

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO

from headrace.errors import StartupError, may_pass
from headrace_transformer.batches.objects import Batch
from headrace_transformer.batches.running import Resources, RunningBatch
from headrace_transformer.batches.store import Limits, Store
from headrace_transformer.settings import TransformerSettings

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_MOST, _MOST_OF_ONE = 16, 2  # Batches that a process runs at once, in all and of one client.
_RETRY_AFTER_S = 30.0  # When a batch that has failed here may be taken again.
_REMOVE_EVERY_S = 600.0


class BatchRunner:
    """Owned by the event loop."""

    def __init__(self, shared: Resources) -> None:
        self._shared = shared
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # Client and task, by batch.
        self._not_before: dict[str, float] = {}
        self._removed_at = float("-inf")

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs batches until `stopping` is set; then their unfinished lines are left to others at once."""
        try:
            while not stopping.is_set():
                wait_s = _POLL_S
                try:
                    await self._look()
                except Exception:
                    logger.exception("looking for batches has failed; trying again")
                    wait_s = _RETRY_AFTER_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), wait_s)
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Takes batches, as many as there is room for."""
        store, now = self._shared.store, time.monotonic()
        if now - self._removed_at >= _REMOVE_EVERY_S:
            self._removed_at = now
            await asyncio.to_thread(store.remove_old)
        unfinished = await asyncio.to_thread(store.unfinished)
        known = {batch_id for batch_id, _ in unfinished}
        self._not_before = {one: when for one, when in self._not_before.items() if one in known}
        of_client = Counter(client for client, _ in self._running.values())
        for batch_id, client in unfinished:
            if len(self._running) >= _MOST:
                return
            is_due = self._not_before.get(batch_id, 0.0) <= now
            if batch_id in self._running or of_client[client] >= _MOST_OF_ONE or not is_due:
                continue
            try:
                taken = await asyncio.to_thread(store.take, batch_id)
            except Exception:  # The others are to run.
                logger.exception("batch %s cannot be taken; trying again", batch_id)
                self._not_before[batch_id] = now + _RETRY_AFTER_S
                continue
            if taken is not None:
                of_client[client] += 1
                self._running[batch_id] = client, asyncio.create_task(self._run(*taken), name=batch_id)

    async def _run(self, batch: Batch, lock: IO[str]) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        try:
            logger.info("running batch %s", batch.id)
            await RunningBatch(self._shared, batch, thread).run()
        except Exception:
            logger.exception("batch %s has failed here; trying again", batch.id)
            self._not_before[batch.id] = time.monotonic() + _RETRY_AFTER_S
        finally:
            self._running.pop(batch.id, None)
            thread.submit(lock.close)
            thread.shutdown(wait=False)


def store_of(settings: TransformerSettings) -> Store | None:
    """The store in the settings' folder, None without one; raises StartupError."""
    if settings.batches is None:
        return None
    try:
        settings.batches.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"TRANSFORMER_BATCHES={settings.batches}: {error.strerror}"
        if not may_pass(error):
            raise StartupError(reason) from None
        logger.warning("%s; batches are refused meanwhile", reason)
    return Store(settings.batches, Limits(settings.batch_storage, settings.batches_per_client, settings.batch_days))
