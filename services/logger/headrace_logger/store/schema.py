"""The SQLite file of the payload log: the tables of tables.py, migrations from older versions, and engines.

Only the owner can read the file (mode 0600). It is in WAL mode, so that `sqlite3` may read it live, and returns the
space of deleted records, which are overwritten with zeros.

Errors: StartupError if the file cannot be used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from headrace.errors import StartupError
from headrace_logger.store.filters import class_of
from headrace_logger.store.tables import TRIGGERS, metadata, now_us, records, usage

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 5

BUSY_MS = 5000
_CACHE_KIB = 16 * 1024  # Four times as much does not increase throughput.
_LOG_BYTES = 64 * 1024 * 1024
_LOG_PAGES = 8192
_INCREMENTAL = 2  # The value of `PRAGMA auto_vacuum`.


def prepare(path: Path) -> None:
    """Creates the file, or migrates that of an earlier logger to the current schema."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its -wal and -shm files the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        engine = open_for_writing(path, fsync=True)
        try:
            _bring_up_to_date(engine, path)
        finally:
            engine.dispose()
    except OSError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.strerror}") from None
    except DatabaseError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.orig}") from None


def open_for_writing(path: Path, fsync: bool) -> sql.Engine:
    """An engine with a single connection, so that its page cache serves every transaction."""
    engine = sql.create_engine(sql.URL.create("sqlite", database=str(path)), pool_size=1, max_overflow=0)
    _configure(
        engine,
        # Takes effect in a file without tables; in others only VACUUM changes it.
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
    return engine


def open_for_export(path: Path) -> sql.Engine:
    """A read-only engine on a file with the current schema."""
    if not path.is_file():
        raise StartupError(f"{path}: no such database; LOGGER_DATABASE or --database names the logger's")
    engine = open_for_reading(path, 1)
    try:
        with engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    except DatabaseError as error:
        raise StartupError(f"{path}: {error.orig}") from None
    check_version(path, version)
    if version < SCHEMA_VERSION:
        raise StartupError(f"{path} is not a payload log, or has an older schema: start this logger with it once")
    return engine


def files_of(path: Path) -> tuple[int, ...]:
    """Identifies the files of an open database, which may be replaced under the same names; empty if one is missing."""
    try:
        return tuple(os.stat(f"{path}{suffix}").st_ino for suffix in ("", "-wal"))
    except FileNotFoundError:
        return ()


def go_on_after(connection: sql.Connection, position: int) -> None:
    """Lets a new database continue the positions of an earlier one."""
    connection.exec_driver_sql("INSERT INTO sqlite_sequence (name, seq) VALUES ('records', ?)", (position,))


def check_version(path: Path, version: int) -> None:
    """Raises StartupError if a newer logger wrote the file."""
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"{path} has schema version {version}, this logger knows {SCHEMA_VERSION}: "
            "start a newer logger or name another file in LOGGER_DATABASE"
        )


def _configure(engine: sql.Engine, *settings: str) -> None:
    def on_connect(connection: Any, _: object) -> None:
        for setting in settings:
            connection.execute(f"PRAGMA {setting}")

    sql.event.listen(engine, "connect", on_connect)


def _bring_up_to_date(engine: sql.Engine, path: Path) -> None:
    with engine.begin() as connection:
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        check_version(path, version)
        # The driver does not begin a transaction by itself before DDL.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if version in _MIGRATIONS:
            logger.info("%s: from schema version %d to %d, once", path, version, SCHEMA_VERSION)
            _MIGRATIONS[version](connection)
        metadata.create_all(connection)
        if version in _WITHOUT_SHARES:
            _fill_shares(connection)
        for trigger in TRIGGERS:
            connection.exec_driver_sql(trigger)
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
    with engine.connect() as connection:
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != _INCREMENTAL:
            # The mode was requested when the connection was opened; VACUUM applies it and temporarily doubles the
            # space.
            try:
                connection.exec_driver_sql("VACUUM")
            except DatabaseError as error:
                logger.warning(
                    "%s does not shrink when records are deleted, until VACUUM succeeds at a start: %s",
                    path,
                    error.orig,
                )


def _from_1(connection: sql.Connection) -> None:
    """Version 1 ordered records by record_id and stored (source, sequence) with each."""
    connection.exec_driver_sql("ALTER TABLE records RENAME TO records_1")
    for name in ("model", "request_id", "trace_id", "status", "finish_reason", "range"):
        connection.exec_driver_sql(f"DROP INDEX IF EXISTS records_by_{name}")
    metadata.create_all(connection)
    connection.connection.create_function("class_of", 1, lambda ms: None if ms is None else class_of(ms))
    kept = "record_id, time_us, model, request_id, trace_id, status, finish_reason, duration_ms, ttft_ms, body"
    connection.exec_driver_sql(
        f"INSERT INTO records ({kept}, duration_class, ttft_class, client, of_call)"  # noqa: S608  # only names
        f" SELECT {kept}, class_of(duration_ms), class_of(ttft_ms), '', 0 FROM records_1 ORDER BY record_id"
    )
    connection.exec_driver_sql("INSERT INTO sources (source) SELECT DISTINCT source FROM records_1")
    connection.exec_driver_sql(
        "INSERT INTO appended (source_id, sequence, time_us)"
        " SELECT source_id, sequence, ? FROM records_1 JOIN sources USING (source)",
        (now_us(),),
    )
    connection.exec_driver_sql("DROP TABLE records_1")


def _add_columns(connection: sql.Connection) -> None:
    """Adds the columns of `records` that are new since an earlier version; each has a default."""
    known = {row.name for row in connection.exec_driver_sql("PRAGMA table_info(records)")}
    for added in (one for one in records.columns if one.name not in known):
        ddl = sql.schema.CreateColumn(added).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE records ADD COLUMN {ddl}")
    for index in records.indexes:
        index.create(connection, checkfirst=True)


def _fill_shares(connection: sql.Connection) -> None:
    connection.exec_driver_sql("DELETE FROM shares")
    connection.exec_driver_sql(
        "INSERT INTO shares (client, refused, bytes)"
        " SELECT client, refused, sum(length(body) + 600) FROM records GROUP BY client, refused"
    )


def _add_engine_time(connection: sql.Connection) -> None:
    """Version 4 has no `engine_us` in `usage`: of its requests only the whole duration is known."""
    ddl = sql.schema.CreateColumn(usage.c.engine_us).compile(dialect=connection.dialect)
    connection.exec_driver_sql(f"ALTER TABLE usage ADD COLUMN {ddl}")
    connection.exec_driver_sql("UPDATE usage SET engine_us = duration_us")


_WITHOUT_SHARES = (1, 2)
# Version of a file → its migration to the current schema. Version 3 has no `usage`, which begins empty.
_MIGRATIONS: dict[int, Callable[[sql.Connection], None]] = {1: _from_1, 2: _add_columns, 4: _add_engine_time}
