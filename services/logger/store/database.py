"""The connections to the SQLite file of schema.py, and the threads on which statements run.

All writes happen on one thread, reads on a few others, none on the event loop; only the constructor, which opens the
file, blocks. If the file is removed, the next write creates a new database and is not acknowledged; until then reads
may raise NotReadyError.

Errors: StartupError if the file cannot be used, NotReadyError if the database stops answering.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from millrace.errors import NotReadyError, StartupError
from services.logger.store import schema

logger = logging.getLogger(__name__)

_READERS = 4

T = TypeVar("T")


class Database:
    """See the module. `opened` gets a connection to each file that is opened; `lost` is called if one was removed."""

    def __init__(
        self, path: Path, fsync: bool, opened: Callable[[sql.Connection], None], lost: Callable[[], None]
    ) -> None:
        self._path = path
        self._fsync = fsync
        self._opened = opened
        self._lost = lost
        self._lost_after: int | None = None  # The last position of a removed database, until its successor exists.
        self._open()
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")

    async def select(self, statement: sql.Executable) -> Sequence[sql.Row[Any]]:
        return await self.read(lambda connection: connection.execute(statement).all())

    async def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(connection, …)` on a reader's thread, in its own transaction."""

        def transact() -> T:
            with self._reading.connect() as connection:
                return work(connection, *arguments)

        return await self._run(self._readers, transact)

    async def write(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(connection, …)` on the writer's thread, and commits."""

        def transact() -> T:
            with self.writing.begin() as connection:
                return work(connection, *arguments)

        return await self.run_writing(transact)

    async def run_writing(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(…)`, which may use `writing`, on the writer's thread.

        Raises NotReadyError if the file was removed meanwhile.
        """

        def checked() -> T:
            if self._lost_after is not None:
                self._create_again()
            result = work(*arguments)
            self._check_files()
            return result

        return await self._run(self._writer, checked)

    async def close(self) -> None:
        """Ends the threads after their current work and closes the connections."""
        for executor in (self._writer, self._readers):
            await asyncio.to_thread(executor.shutdown)
        self._reading.dispose()
        self.writing.dispose()

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        except DatabaseError as error:
            logger.error("the database failed: %s", error.orig)
            raise NotReadyError("the payload store does not answer") from error

    def _open(self) -> None:
        schema.prepare(self._path)
        self.writing = schema.open_for_writing(self._path, self._fsync)
        self._reading = schema.open_for_reading(self._path, _READERS)
        with self.writing.connect() as connection:
            self._opened(connection)  # The first read creates the log beside the file.
        self._files = schema.files_of(self._path)

    def _check_files(self) -> None:
        """Creates a new database if the files were removed; on the writer's thread.

        SQLite would continue to write to the unlinked files, and everything would be lost at the stop.
        """
        if schema.files_of(self._path) == self._files:
            return
        logger.error("%s was removed, with every record in it: creating a new one", self._path)
        self._lost()
        with self.writing.connect() as connection:
            self._lost_after = schema.last_position(connection)
        self._create_again()

    def _create_again(self) -> NoReturn:
        """Opens a new database that continues the positions of the removed one; raises NotReadyError in any case."""
        self._reading.dispose()
        self.writing.dispose()
        try:
            self._open()
            with self.writing.begin() as connection:
                schema.go_on_after(connection, self._lost_after or 0)
        except StartupError as error:
            raise NotReadyError(f"the payload store cannot be re-created: {error}") from None
        self._lost_after = None
        raise NotReadyError("the payload store has been re-created")
