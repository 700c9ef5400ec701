"""Runs functions on another thread's event loop, in their order; what comes together wakes the loop once.

Waking another thread costs more than what there is to do: a write to its event file descriptor, and a change of the
thread that has the interpreter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """That of one event loop. A closed loop runs nothing: it has no tasks left."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._functions: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, function: Callable[[], None]) -> None:
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
