"""A database of payload records, and the threads on which statements run; SQLite's is in sqlite.py, another in
postgresql.py.

All writes of a logger happen on one thread, reads on a few others, none on the event loop.

Errors: NotReadyError if the database stops answering.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

import sqlalchemy as sql

READERS = 4

T = TypeVar("T")


class Database(ABC):
    """`is_shared`: several loggers may write to it."""

    is_shared = False
    _reading: sql.Engine

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(READERS, "store-reader")

    @abstractmethod
    def begin(self) -> AbstractContextManager[sql.Connection]:
        """A transaction that writes, on the writer's thread."""

    @abstractmethod
    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Runs `work()` on a thread; raises NotReadyError if the database does not answer."""

    @abstractmethod
    async def run_writing(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(…)`, which may `begin`, on the writer's thread; it may run a second time."""

    @abstractmethod
    async def give_back(self) -> None:
        """Returns deleted records' space to the file system, where this is the logger's task."""

    async def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(connection, …)` on a reader's thread, in its own transaction."""

        def transact() -> T:
            with self._reading.connect() as connection:
                return work(connection, *arguments)

        return await self._run(self._readers, transact)

    async def select(self, statement: sql.Executable) -> Sequence[sql.Row[Any]]:
        return await self.read(lambda connection: connection.execute(statement).all())

    async def write(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(connection, …)` on the writer's thread, and commits."""

        def transact() -> T:
            with self.begin() as connection:
                return work(connection, *arguments)

        return await self.run_writing(transact)

    def alone(self, name: str) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Of a shared database: waits until no other logger has this name; gives a check of whether that is still so.

        The check blocks.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the threads after their current work and closes the connections."""
        for executor in (self._writer, self._readers):
            await asyncio.to_thread(executor.shutdown)


def shown(url: sql.URL) -> str:
    """The URL for messages: without the password and options."""
    return url.set(query={}).render_as_string(hide_password=True)
