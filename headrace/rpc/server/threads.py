"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """Runs `work` on a thread that does not hold up the process's end: a download can take minutes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(outcome: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            report(lambda: done.set_exception(failure))
        else:
            report(lambda: done.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
