"""An event loop on its own thread, for code that may block it, and a bounded queue between it and another event loop.

`LoopThread.start` and `call` are thread-safe. Code on this thread cannot end the process: SystemExit and
KeyboardInterrupt that escape a task are logged, and the loop continues. After `watch`, the thread is regarded as dead
when code blocks the loop for too long: only the end of the process can stop such code.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import uvloop

from headrace.errors import HeadraceError, NotReadyError
from headrace.rpc.server.watchdog import LoopWatchdog, dump_tracebacks

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STOP_TIMEOUT_S = 1.0  # For each of the two: cancelled tasks, and the final coroutine.


class Mailbox:
    """Runs functions on an event loop, in their order, from any thread; what comes together wakes the loop once.

    Waking another thread costs more than what there is to do: a write to its event file descriptor, and a change of the
    thread that has the interpreter. A closed loop runs nothing: it has no tasks left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._functions: deque[Callable[[], object]] = deque()
        self._is_due = False

    def post(self, function: Callable[[], object]) -> None:
        """Has the loop run a function, which must not raise; from any thread."""
        self._functions.append(function)
        # `_run` clears this before it looks for functions, so it finds one that was appended while this was set.
        if not self._is_due:
            self._is_due = True
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_due = False
        while self._functions:
            self._functions.popleft()()


class LoopThread:
    """See the module. The thread is a daemon: code that blocks for ever does not delay the end of the process."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self.mailbox = Mailbox(self._loop)
        self.stopping = False
        self._ended = False
        self._stopped = threading.Event()
        self._hangs = threading.Event()
        self._watchdog: LoopWatchdog | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(
        self, begin: Callable[[], Coroutine[Any, Any, T]], ended: Callable[[T | None], None]
    ) -> Callable[[], None]:
        """Runs `begin()`, which must not raise, as a task; raises NotReadyError once stopping.

        `ended` is called on the thread with the task's result, or with None if it was cancelled. Gives a function that
        cancels the task, and does not wait for that.
        """
        tasks: list[asyncio.Task[T]] = []

        def create() -> None:
            tasks.append(self._loop.create_task(begin()))
            tasks[0].add_done_callback(lambda task: ended(None if task.cancelled() else task.result()))

        def cancel() -> None:
            if not (tasks and tasks[0].done()):
                # The mailbox keeps the order of calls, so the task has started by then.
                self.mailbox.post(lambda: tasks[0].cancel())

        if self.stopping or self._stopped.is_set():
            raise NotReadyError("the model is stopping")
        self.mailbox.post(create)
        return cancel

    def call(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns or raises the outcome of `begin()`, including SystemExit; blocks until then."""

        async def run() -> T | BaseException:
            try:
                return await begin()
            except BaseException as error:
                # The caller raises it: raised here, it would end the loop.
                return error

        result = asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        if isinstance(result, BaseException):
            raise result
        return result

    def watch(self, timeout_s: float) -> None:
        """Starts the watchdog: the thread is treated as dead after its loop has not responded for `timeout_s`."""

        def hang() -> None:
            logger.critical("%s has been blocked for %g s", self._thread.name, timeout_s)
            dump_tracebacks()
            self._hangs.set()

        self._watchdog = LoopWatchdog(self._loop, timeout_s, hang)

    async def died(self) -> None:
        """Waits until the thread hangs, or ends without `stop`."""
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
            # Code that stops the loop from inside does not end it either; only `_end` does.
            while not self._ended:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    logger.exception("a task on %s tried to end the process", threading.current_thread().name)
        finally:
            self._stopped.set()
            self._loop.close()


class ReaderLeftError(Exception):
    """The reader has left the channel."""


class Channel(Generic[T]):
    """A bounded queue between tasks on two event loops, whose mailboxes it has.

    The writer waits when items of the weight `capacity` are unread, until half of it is read, so a slow reader slows it
    down. One task writes, one reads; items arrive in order, before the end or the error that follows them. Either side
    may leave at any time, from any thread; the other side is notified.
    """

    def __init__(self, capacity: int, readers: Mailbox, writers: Mailbox) -> None:
        self._capacity = capacity
        self._readers = readers
        self._writers = writers
        self._lock = threading.Lock()
        self._items: deque[tuple[T, int]] = deque()
        self._weight = 0  # Of all of them.
        self._ended = False
        self._error: HeadraceError | None = None
        self.left = False  # Nothing more will be read.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def put(self, item: T, weight: int = 1) -> None:
        """Adds an item of at most the capacity's weight once there is room; raises ReaderLeftError."""
        while True:
            with self._lock:
                if self.left:
                    raise ReaderLeftError
                if self._weight + weight <= self._capacity:
                    self._items.append((item, weight))
                    self._weight += weight
                    self._wake_reader()
                    return
                wake = self._writer = asyncio.get_running_loop().create_future()
            await wake

    def end(self, error: HeadraceError | None = None) -> None:
        """Ends the items, normally or with an error; only the first call has an effect."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._wake_reader()

    async def get(self) -> tuple[T, bool] | None:
        """Returns the next item and whether it is known to be the last; None after the last; or raises the error."""
        while True:
            with self._lock:
                if self._items:
                    item, weight = self._items.popleft()
                    self._weight -= weight
                    if self._weight <= self._capacity // 2:
                        self._wake_writer()
                    return item, self._ended and self._error is None and not self._items
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return None
                wake = self._reader = asyncio.get_running_loop().create_future()
            await wake

    def leave(self) -> None:
        """Declares that nothing more will be read."""
        with self._lock:
            self.left = True
            self._items.clear()
            self._weight = 0
            self._wake_writer()

    def _wake_reader(self) -> None:
        waiting, self._reader = self._reader, None
        if waiting is not None:
            self._readers.post(partial(_set, waiting))

    def _wake_writer(self) -> None:
        waiting, self._writer = self._writer, None
        if waiting is not None:
            self._writers.post(partial(_set, waiting))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
