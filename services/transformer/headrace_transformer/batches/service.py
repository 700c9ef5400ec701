"""The Batch API of one transformer: its methods, and what runs batches in this process."""

from __future__ import annotations

import asyncio
import logging

from headrace.errors import StartupError, may_pass
from headrace_transformer.batches.line_calls import methods_of
from headrace_transformer.batches.runner import BatchRunner
from headrace_transformer.batches.running import Resources, count_requests
from headrace_transformer.batches.servicer import BatchesServicer
from headrace_transformer.batches.store import Limits, Store
from headrace_transformer.frontends.openai.servicer import OpenAIServicer
from headrace_transformer.frontends.responses.servicer import ResponsesServicer
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router
from headrace_transformer.settings import TransformerSettings

logger = logging.getLogger(__name__)


class BatchService:
    """Without a folder in the settings the methods are refused, and nothing runs. Raises StartupError."""

    def __init__(
        self, settings: TransformerSettings, openai: OpenAIServicer, responses: ResponsesServicer, router: Router
    ) -> None:
        self._bodies = BodyProcesses()  # Apart from those of requests that somebody waits for.
        store = _store(settings)
        methods = methods_of(openai, responses)
        self.servicer = BatchesServicer(store, methods, self._bodies)
        self._runner: BatchRunner | None = None
        if store is not None:
            slots = asyncio.Semaphore(settings.batch_concurrency)
            find, concurrency = router.wait_for, settings.batch_concurrency
            self._runner = BatchRunner(
                Resources(store, self._bodies, methods, find, slots, concurrency, count_requests())
            )

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs batches until `stopping` is set."""
        if self._runner is not None:
            await self._runner.run(stopping)

    async def close(self) -> None:
        await self._bodies.close()


def _store(settings: TransformerSettings) -> Store | None:
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
