"""Threads that check whether something in this process still makes progress.

Elapsed time is the sum of the intervals between checks, each limited to twice its nominal length. So a process that was
stopped (SIGSTOP, a frozen container) or got no CPU does not appear to hang: its watchdogs were delayed as well.
"""

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 5.0
_LAG_EVERY_S = 0.1
_LAGS = 100  # Ten seconds: longer than most pages' scrape interval, so that no delay falls between two scrapes.


class Watchdog(threading.Thread):
    """Calls `stuck()` once when `mark()` has not changed for `timeout_s`. A mark of None means that there is no work.

    Both are called on the watchdog's own thread.
    """

    def __init__(
        self, name: str, timeout_s: float, mark: Callable[[], Hashable | None], stuck: Callable[[], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._timeout_s = timeout_s
        self._mark = mark
        self._stuck = stuck
        self._ends = threading.Event()

    def end(self) -> None:
        """Lets the thread end; any thread may."""
        self._ends.set()

    def join(self, timeout: float | None = _JOIN_TIMEOUT_S) -> None:
        """Waits for that, seconds at most."""
        super().join(timeout)

    def run(self) -> None:
        interval_s = min(_LONGEST_INTERVAL_S, self._timeout_s / 4)
        still_s = 0.0
        seen = self._mark()
        looked_at = time.monotonic()
        while not self._ends.wait(interval_s):
            now = time.monotonic()
            still_s += min(now - looked_at, 2 * interval_s)
            looked_at = now
            mark = self._mark()
            if mark is None or mark != seen:
                seen, still_s = mark, 0.0
            elif still_s > self._timeout_s:
                self._stuck()
                return


class LoopWatchdog:
    """Calls `stuck` on a thread of its own when an event loop does not answer for `timeout_s`.

    Without one it ends the process, with the traceback of every thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, stuck: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._requested = self._answered = 0
        self._watchdog = Watchdog("watchdog-loop", timeout_s, self._ping, stuck or self._end_process)
        self._watchdog.start()

    def close(self) -> None:
        """Ends the thread; called before the loop closes."""
        self._watchdog.end()
        self._watchdog.join()

    def _ping(self) -> int:
        if self._answered == self._requested:
            self._requested += 1
            with suppress(RuntimeError):  # The loop has closed.
                self._loop.call_soon_threadsafe(self._answer, self._requested)
        return self._requested

    def _answer(self, number: int) -> None:
        self._answered = number

    def _end_process(self) -> None:
        dump_tracebacks()
        # Not by the log: the stuck thread may hold its lock.
        os.write(2, f"the event loop has not answered for {self._timeout_s:g} s: the process ends\n".encode())
        os._exit(os.EX_SOFTWARE)


def dump_tracebacks() -> None:
    """Writes the current traceback of every thread to standard error."""
    try:
        faulthandler.dump_traceback(all_threads=True)
    except (RuntimeError, ValueError, OSError) as error:
        logger.warning("standard error takes no traceback: %s", error)


async def watch_loop_lag() -> None:
    """Measures, until cancelled, how late the loop wakes a task."""
    latest: deque[float] = deque(maxlen=_LAGS)

    def longest(_: CallbackOptions) -> Iterable[Observation]:
        # A copy, because the loop runs meanwhile.
        return [Observation(max(tuple(latest), default=0.0))]

    metrics.get_meter("headrace").create_observable_gauge(
        "headrace.event_loop.lag", [longest], "s", "The longest delay of the event loop in the last ten seconds."
    )
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_EVERY_S)
        latest.append(max(0.0, time.monotonic() - before - _LAG_EVERY_S))
