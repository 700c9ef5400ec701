"""Long operations that callers start and wait for but do not own: an operation continues when its caller leaves."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import DeadlineError, HeadraceError, NotReadyError, OverloadedError

logger = logging.getLogger(__name__)

_MAX_OPERATIONS = 16  # Running or queued.
_MAX_WAIT_S = 570.0  # The gateway's timeout for such a call is 600.


class Operations:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, what: str, work: Coroutine[Any, Any, None], deadline: Deadline) -> None:
        """Runs `work` and waits for it until the caller's deadline; raises its error, or DeadlineError."""
        if len(self._tasks) >= _MAX_OPERATIONS:
            work.close()
            raise OverloadedError(f"{_MAX_OPERATIONS} loads and unloads are in progress; retry later")
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, what))
        left_s = max(0.0, deadline.at - time.monotonic())
        done, _ = await asyncio.wait((task,), timeout=min(_MAX_WAIT_S, left_s))
        if not done:
            raise DeadlineError(f"the {what} is still running; RepositoryIndex reports its result")
        if task.cancelled():
            raise NotReadyError("the predictor is stopping")
        task.result()

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # The caller may have left: log the error.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed: %s", what, error, exc_info=None if isinstance(error, HeadraceError) else error)
