"""A bounded queue between tasks on two event loops.

The writer waits when items of the weight `capacity` are unread, until half of it is read, so a slow reader slows it
down. One task writes, one reads; items arrive in order, before the end or the error that follows them. Either side may
leave at any time, from any thread; the other side is notified.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial
from typing import Generic, TypeVar

from headrace.errors import HeadraceError
from headrace_predictor.tensor_models.loop_thread import Mailbox

T = TypeVar("T")


class ReaderLeftError(Exception):
    """The reader has left the channel."""


class Channel(Generic[T]):
    """See the module; the mailboxes are those of the two event loops."""

    def __init__(self, capacity: int, readers: Mailbox, writers: Mailbox) -> None:
        self._capacity = capacity
        self._readers = readers
        self._writers = writers
        self._lock = threading.Lock()
        self._items: deque[tuple[T, int]] = deque()
        self._weight = 0  # Of all of them.
        self._ended = False
        self._error: HeadraceError | None = None
        self._left = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    @property
    def left(self) -> bool:
        return self._left

    async def put(self, item: T, weight: int = 1) -> None:
        """Adds an item of at most the capacity's weight once there is room; raises ReaderLeftError."""
        while True:
            with self._lock:
                if self._left:
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
            self._left = True
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
