"""Blocking work beside the event loop: a thread of its own, or threads that callers compete for.

Callers have turns, and each has half of the places at most. The next is of the caller with the least work so far, by
its cost; of one caller's the first that came, but costly work lets cheap work that came a little later pass: a cost of
n counts as n later arrivals. A caller without a name is this stack itself and has all places.
"""

import asyncio
import contextvars
import heapq
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

from headrace.errors import OverloadedError

_RETRY_AFTER_MS = 100

T = TypeVar("T")


class FairThreads:
    """`places` are for work that waits or runs. May be called by any thread."""

    def __init__(self, threads: int, places: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._places = places
        self._lock = threading.Lock()  # Of what follows.
        self._held: Counter[str] = Counter()  # By caller: what waits or runs.
        self._waiting: dict[str, list[Any]] = {}  # Heaps of (turn, number, cost, future, work).
        self._done: dict[str, float] = {}  # The cost of what has run, of callers that wait.
        self._arrivals = count()

    @property
    def is_idle(self) -> bool:
        return not self._held

    def submit(self, caller: str, function: Callable[..., T], *arguments: Any, cost: float = 1.0) -> Future[T] | None:
        """The result of `function(*arguments)`; None where there is no place. A future that is cancelled is not run."""
        future: Future[T] = Future()
        with self._lock:
            if self._held.total() >= self._places or (caller and 2 * self._held[caller] >= self._places):
                return None
            self._held[caller] += 1
            number = next(self._arrivals)
            if caller not in self._waiting:
                self._waiting[caller] = []
                self._done[caller] = min(self._done.values(), default=0.0)
            work = partial(function, *arguments)
            heapq.heappush(self._waiting[caller], (number + cost, number, cost, future, work))
        self._executor.submit(self._next)
        return future

    async def run(self, caller: str, function: Callable[..., T], *arguments: Any) -> T:
        """The same for a task, whose context the function has; raises OverloadedError where there is no place.

        A caller that leaves does not end what runs: a thread cannot be stopped.
        """
        future = self.submit(caller, contextvars.copy_context().run, function, *arguments)
        if future is None:
            most = f"at most {self._places} may, half of them of one client"
            raise OverloadedError(f"too many requests wait for a thread: {most}", retry_after_ms=_RETRY_AFTER_MS)
        return await asyncio.wrap_future(future)

    def close(self, last: Callable[[], object] = bool) -> None:
        """Takes no more work, drops what waits, and ends with `last` on a thread; does not wait for what runs."""
        with self._lock:
            waiting = [future for entries in self._waiting.values() for *_, future, _ in entries]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._executor.submit(last)
        self._executor.shutdown(wait=False)

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # Closed meanwhile.
            caller = min(self._waiting, key=self._done.__getitem__)
            _, _, cost, future, work = heapq.heappop(self._waiting[caller])
            self._done[caller] += cost
            if not self._waiting[caller]:
                del self._waiting[caller], self._done[caller]
        result, error = None, None
        is_wanted = future.set_running_or_notify_cancel()
        if is_wanted:
            try:
                result = work()
            except BaseException as raised:  # Whoever waits for it has it.
                error = raised
        with self._lock:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]
        if error is not None:
            future.set_exception(error)
        elif is_wanted:
            future.set_result(result)


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """Runs `work` on a thread that does not hold up the process's end: a download can take minutes."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # A cancellation of the wait leaves it alone.

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # Whoever waits for it has it.
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
