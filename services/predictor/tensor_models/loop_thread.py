"""An event loop on a thread of its own, for code that may block it.

`start` and `call` may be used from any thread. What runs there cannot end the process: SystemExit
and KeyboardInterrupt that escape a task are logged, and the loop goes on. From `watch` on, code that
blocks the loop for too long is the thread's death: nothing can end it but the process's end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from millrace.errors import NotReadyError
from millrace.rpc.watchdog import LoopWatchdog, dump_tracebacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_TIMEOUT_S = 1.0  # For each of the two: tasks that are cancelled, and what runs after them.


class Work:
    """A task on the thread's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.task: asyncio.Task[Any] | None = None
        self._loop = loop

    def cancel(self) -> None:
        """Cancels the task; returns at once."""
        # After the task's own beginning, for the loop keeps the order; one that has closed has ended it.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class LoopThread:
    """See the module. The thread is a daemon: code that blocks for ever does not hold up the process's end."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self.stopping = False
        self._ended = False
        self._stopped = threading.Event()
        self._hangs = threading.Event()
        self._watchdog: LoopWatchdog | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def tasks(self) -> int:
        """How many tasks have not ended."""
        return len(asyncio.all_tasks(self._loop))

    def start(self, begin: Callable[[], Coroutine[Any, Any, T]], ended: Callable[[T | None], None]) -> Work:
        """Runs `begin()`, which raises nothing, as a task; raises NotReadyError once stopping.

        `ended` is called on the thread with what it returns, or None where it was cancelled.
        """
        work = Work(self._loop)

        def run() -> None:
            task = work.task = self._loop.create_task(begin())
            task.add_done_callback(lambda task: ended(None if task.cancelled() else task.result()))

        if self.stopping or self._stopped.is_set():
            raise NotReadyError("the model is stopping")
        self._loop.call_soon_threadsafe(run)
        return work

    def call(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `begin()`, or what it raises, SystemExit too; blocks for as long as it takes."""

        async def run() -> T | BaseException:
            try:
                return await begin()
            except BaseException as error:
                # Raised by the caller and not here, where it would end the loop.
                return error

        result = asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        if isinstance(result, BaseException):
            raise result
        return result

    def watch(self, timeout_s: float) -> None:
        """Takes the thread for dead once its loop has not answered for `timeout_s`."""

        def hang() -> None:
            logger.critical("%s has been blocked for %g s", self._thread.name, timeout_s)
            dump_tracebacks()
            self._hangs.set()

        self._watchdog = LoopWatchdog(self._loop, timeout_s, hang)

    async def died(self) -> None:
        """Waits until the thread ends without having been stopped, or hangs."""
        while self.stopping or not (self._stopped.is_set() or self._hangs.is_set()):  # noqa: ASYNC110  # a thread's event cannot be awaited
            await asyncio.sleep(0.2)

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancels every task, runs `last()` and ends the thread; blocks for seconds at most."""
        self.stopping = True
        if self._watchdog is not None:
            self._watchdog.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end(last)))
        self._thread.join(3 * _STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("%s does not end: something in it blocks", self._thread.name)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_STOP_TIMEOUT_S)
        if last is not None:
            task = self._loop.create_task(last())
            await asyncio.wait((task,), timeout=_STOP_TIMEOUT_S)
        await self._loop.shutdown_asyncgens()
        self._ended = True
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            # Nor does what stops the loop from inside, short of `_end`.
            while not self._ended:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    logger.exception("a task on %s tried to end the process", threading.current_thread().name)
        finally:
            self._stopped.set()
            self._loop.close()
