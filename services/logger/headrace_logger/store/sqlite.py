"""The payload log in an SQLite file.

Only the owner can read the file (mode 0600). It is in WAL mode, so that `sqlite3` may read it live, and returns the
space of deleted records, which are overwritten with zeros. Only the constructor, which opens the file, blocks. If the
file is removed, the next write creates a new database and is not acknowledged; until then reads may raise
NotReadyError.

Errors: StartupError if the file cannot be used, NotReadyError if the database stops answering.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from headrace.errors import NotReadyError, StartupError
from headrace_logger.store import tables
from headrace_logger.store.database import READERS, Database
from headrace_logger.store.reading import last_position

logger = logging.getLogger(__name__)

BUSY_MS = 5000
# A reader can keep the log from being truncated; this is the longest wait for it.
_LOG_BUSY_MS = 100
_CACHE_KIB = 16 * 1024  # Four times as much does not increase throughput.
_LOG_BYTES = 64 * 1024 * 1024
_LOG_PAGES = 8192
_FREED_PAGES = 1_000  # At once.

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
        while await self.run_writing(self._give_back_some):
            pass
        await self.run_writing(self._empty_log)

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
        self._writing = prepare(self._path, self._fsync)
        self._reading = open_for_reading(self._path, READERS)
        with self._writing.connect() as connection:
            self._opened(connection)  # The first read creates the log beside the file.
        self._files = _files_of(self._path)

    def _check_files(self) -> None:
        """Creates a new database if the files were removed; on the writer's thread.

        SQLite would continue to write to the unlinked files, and everything would be lost at the stop.
        """
        if _files_of(self._path) == self._files:
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
                go_on_after(connection, self._lost_after or 0)
        except StartupError as error:
            raise NotReadyError(f"the payload store cannot be re-created: {error}") from None
        self._lost_after = None
        raise NotReadyError("the payload store has been re-created")

    def _give_back_some(self) -> bool:
        """Returns some free pages of the file to the file system; whether there may be more."""
        with self._writing.connect() as connection:
            before = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            # The driver executes a statement without columns only for its first row, which is one page; a script it
            # executes fully.
            driver: Any = connection.connection.driver_connection
            driver.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
            return bool(0 < connection.exec_driver_sql("PRAGMA freelist_count").scalar_one() < before)

    def _empty_log(self) -> None:
        """Moves the write-ahead log's contents to the file and truncates it, which a slow reader prevents."""
        with self._writing.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {_LOG_BUSY_MS}")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_MS}")


def prepare(path: Path, fsync: bool) -> sql.Engine:
    """Creates the file if it is missing; returns an engine that writes to it, or raises StartupError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its -wal and -shm files the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        engine = _open_for_writing(path, fsync)
        with ExitStack() as undo:
            undo.callback(engine.dispose)
            with engine.begin() as connection:
                # The driver does not begin a transaction by itself before DDL.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                tables.prepare(connection, str(path))
            undo.pop_all()
    except OSError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.strerror}") from None
    except DatabaseError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.orig}") from None
    return engine


def go_on_after(connection: sql.Connection, position: int) -> None:
    """Lets a new database continue the positions of an earlier one."""
    numbered = sql.table("sqlite_sequence", sql.column("name"), sql.column("seq"))
    connection.execute(sql.insert(numbered), {"name": tables.records.name, "seq": position})


def _open_for_writing(path: Path, fsync: bool) -> sql.Engine:
    """An engine with a single connection, so that its page cache serves every transaction."""
    engine = sql.create_engine(sql.URL.create("sqlite", database=str(path)), pool_size=1, max_overflow=0)
    _configure(
        engine,
        # Takes effect in a file without tables.
        "auto_vacuum = INCREMENTAL",
        # Readers never wait for the writer.
        "journal_mode = WAL",
        # Pages that many commits change are written from the log to the file once.
        f"wal_autocheckpoint = {_LOG_PAGES}",
        f"journal_size_limit = {_LOG_BYTES}",
        f"synchronous = {'FULL' if fsync else 'NORMAL'}",
        "secure_delete = ON",
        f"cache_size = -{_CACHE_KIB}",
        f"busy_timeout = {BUSY_MS}",
    )
    return engine


def open_for_reading(path: Path, connections: int) -> sql.Engine:
    """A read-only engine on an existing file."""
    database = path.absolute().as_uri()
    url = sql.URL.create("sqlite", database=database, query={"mode": "ro", "uri": "true"})
    engine = sql.create_engine(url, pool_size=connections, max_overflow=0)
    _configure(engine, f"busy_timeout = {BUSY_MS}")
    # The driver does not begin a transaction by itself before SELECT.
    sql.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _configure(engine: sql.Engine, *settings: str) -> None:
    def on_connect(connection: Any, _: object) -> None:
        for setting in settings:
            connection.execute(f"PRAGMA {setting}")

    sql.event.listen(engine, "connect", on_connect)


def _files_of(path: Path) -> tuple[int, ...]:
    """Identifies the files of an open database, which may be replaced under the same names; empty if one is missing."""
    try:
        return tuple(os.stat(f"{path}{suffix}").st_ino for suffix in ("", "-wal"))
    except FileNotFoundError:
        return ()
