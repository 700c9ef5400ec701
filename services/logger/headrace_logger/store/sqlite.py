"""The connections to the SQLite file of schema.py.

Only the constructor, which opens the file, blocks. If the file is removed, the next write creates a new database and is
not acknowledged; until then reads may raise NotReadyError.

Errors: StartupError if the file cannot be used, NotReadyError if the database stops answering.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from headrace.errors import NotReadyError, StartupError
from headrace_logger.store import removing, schema
from headrace_logger.store.database import READERS, Database
from headrace_logger.store.reading import last_position

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SqliteDatabase(Database):
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
        super().__init__()

    def begin(self) -> AbstractContextManager[sql.Connection]:
        return self._writing.begin()

    async def run_writing(self, work: Callable[..., T], *arguments: Any) -> T:
        """See Database; raises NotReadyError if the file was removed meanwhile."""

        def checked() -> T:
            if self._lost_after is not None:
                self._create_again()
            result = work(*arguments)
            self._check_files()
            return result

        return await self._run(self._writer, checked)

    async def give_back(self) -> None:
        """Returns deleted records' space to the file system, and removes their contents from the write-ahead log."""
        while await self.run_writing(removing.give_back_some, self._writing):
            pass
        await self.run_writing(removing.empty_log, self._writing)

    async def close(self) -> None:
        await super().close()
        self._reading.dispose()
        self._writing.dispose()

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        except DatabaseError as error:
            logger.error("the database failed: %s", error.orig)
            raise NotReadyError("the payload store does not answer") from error

    def _open(self) -> None:
        schema.prepare(self._path)
        self._writing = schema.open_for_writing(self._path, self._fsync)
        self._reading = schema.open_for_reading(self._path, READERS)
        with self._writing.connect() as connection:
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
        with self._writing.connect() as connection:
            self._lost_after = last_position(connection)
        self._create_again()

    def _create_again(self) -> NoReturn:
        """Opens a new database that continues the positions of the removed one; raises NotReadyError in any case."""
        self._reading.dispose()
        self._writing.dispose()
        try:
            self._open()
            with self._writing.begin() as connection:
                schema.go_on_after(connection, self._lost_after or 0)
        except StartupError as error:
            raise NotReadyError(f"the payload store cannot be re-created: {error}") from None
        self._lost_after = None
        raise NotReadyError("the payload store has been re-created")
