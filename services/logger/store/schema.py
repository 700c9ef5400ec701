"""The SQLite file of the payload log: its tables, migrations from older versions, and engines.

`records` holds each record as its serialized protobuf beside the columns that queries filter by. `position` is the
order of commit, never reused. Every index ends in `time_us` and, like all of SQLite's, in `position`: matches are in
the order of queries. `of_call` marks a record of only the gateway's access log, and whether a service's record of the
same call may still replace it. `calls` holds the gateway's part of a call, by the gateway's call id; without contents
if the call's records were deleted. `appended` holds the received sequences of each source, apart from the records: a
deleted record does not return. `deletions` holds requested deletions, for records that arrive later. `cursors` holds
the positions of readers of all records. `shares` holds the space of each client's records, with refused requests
separately; triggers maintain it.

Times are whole microseconds since 1970. Only the owner can read the file (mode 0600). It is in WAL mode, so that
`sqlite3` may read it live, and returns the space of deleted records, which are overwritten with zeros.

Errors: StartupError if the file cannot be used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from millrace.errors import StartupError
from services.logger.store.filters import class_of

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3

BUSY_MS = 5000
_CACHE_KIB = 16 * 1024  # Four times as much does not increase throughput.
_LOG_BYTES = 64 * 1024 * 1024
_LOG_PAGES = 8192
_INCREMENTAL = 2  # The value of `PRAGMA auto_vacuum`.

# Values of `of_call`: a service's record; a call's record for good; a call's record until a service's record arrives.
NOT_OF_CALL, OF_CALL, OF_CALL_FOR_NOW = 0, 1, 2

_metadata = sql.MetaData()
records = sql.Table(
    "records",
    _metadata,
    sql.Column("position", sql.Integer, primary_key=True),
    sql.Column("record_id", sql.String, nullable=False, unique=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("model", sql.String, nullable=False),
    sql.Column("request_id", sql.String, nullable=False),
    sql.Column("trace_id", sql.String, nullable=False),
    sql.Column("client", sql.String, nullable=False),
    sql.Column("status", sql.String, nullable=False),
    sql.Column("finish_reason", sql.String, nullable=False),
    sql.Column("duration_ms", sql.Double),
    sql.Column("duration_class", sql.Integer),
    sql.Column("ttft_ms", sql.Double),
    sql.Column("ttft_class", sql.Integer),
    sql.Column("call_id", sql.String),
    sql.Column("of_call", sql.Integer, nullable=False),
    # Whether the request was refused, or left by its caller, before any output.
    sql.Column("refused", sql.Integer, nullable=False, server_default="0"),
    sql.Column("body", sql.LargeBinary, nullable=False),
    *(
        sql.Index(f"records_by_{name}", name, "time_us")
        for name in ("model", "request_id", "trace_id", "client", "status", "finish_reason")
    ),
    # For scans of the newest records: it contains every column that they compare.
    sql.Index("records_by_time", "time_us", "position", "duration_ms", "ttft_ms"),
    sql.Index("records_by_duration", "duration_class"),
    sql.Index("records_by_ttft", "ttft_class"),
    sql.Index("records_by_call", "call_id", sqlite_where=sql.text("call_id IS NOT NULL")),
    sql.Index("records_refused", "client", "time_us", sqlite_where=sql.text("refused")),
    sqlite_autoincrement=True,
)
calls = sql.Table(
    "calls",
    _metadata,
    sql.Column("call_id", sql.String, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("gateway", sql.LargeBinary),
    sql.Index("calls_deleted", "time_us", sqlite_where=sql.text("gateway IS NULL")),
    sqlite_with_rowid=False,
)
sources = sql.Table(
    "sources",
    _metadata,
    sql.Column("source_id", sql.Integer, primary_key=True),
    sql.Column("source", sql.String, nullable=False, unique=True),
)
appended = sql.Table(
    "appended",
    _metadata,
    sql.Column("source_id", sql.Integer, primary_key=True),
    sql.Column("sequence", sql.BigInteger, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
deletions = sql.Table(
    "deletions",
    _metadata,
    sql.Column("key", sql.String, primary_key=True),
    sql.Column("value", sql.String, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
cursors = sql.Table(
    "cursors",
    _metadata,
    sql.Column("name", sql.String, primary_key=True),
    sql.Column("position", sql.Integer, nullable=False),
    sqlite_with_rowid=False,
)
shares = sql.Table(
    "shares",
    _metadata,
    sql.Column("client", sql.String, primary_key=True),
    sql.Column("refused", sql.Integer, primary_key=True),
    sql.Column("bytes", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
# 600 is an estimate of a record's space besides its body: columns and index entries.
_TRIGGERS = (
    "CREATE TRIGGER IF NOT EXISTS share_more AFTER INSERT ON records BEGIN"
    " INSERT INTO shares (client, refused, bytes) VALUES (new.client, new.refused, length(new.body) + 600)"
    " ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END",
    "CREATE TRIGGER IF NOT EXISTS share_less AFTER DELETE ON records BEGIN"
    " UPDATE shares SET bytes = bytes - length(old.body) - 600"
    " WHERE client = old.client AND refused = old.refused; END",
)


# Any number of keys as one parameter, a JSON list.
EACH = "(SELECT value FROM json_each(?))"


def column(connection: sql.Connection, statement: str, *parameters: Any) -> list[Any]:
    """The first column of a statement's result."""
    return list(connection.exec_driver_sql(statement, parameters).scalars())


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000


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


def files_of(path: Path) -> tuple[int, ...]:
    """Identifies the files of an open database, which may be replaced under the same names; empty if one is missing."""
    try:
        return tuple(os.stat(f"{path}{suffix}").st_ino for suffix in ("", "-wal"))
    except FileNotFoundError:
        return ()


def last_position(connection: sql.Connection) -> int:
    """The highest position ever used; 0 if there was no record."""
    return next(iter(column(connection, "SELECT seq FROM sqlite_sequence WHERE name = 'records'")), 0)


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
        _metadata.create_all(connection)
        if version in _MIGRATIONS:
            _fill_shares(connection)
        for trigger in _TRIGGERS:
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
                    "%s keeps its size, whatever is deleted, until a start succeeds in VACUUM: %s", path, error.orig
                )


def _from_1(connection: sql.Connection) -> None:
    """Version 1 ordered records by record_id and stored (source, sequence) with each."""
    connection.exec_driver_sql("ALTER TABLE records RENAME TO records_1")
    for name in ("model", "request_id", "trace_id", "status", "finish_reason", "range"):
        connection.exec_driver_sql(f"DROP INDEX IF EXISTS records_by_{name}")
    _metadata.create_all(connection)
    connection.connection.create_function("class_of", 1, lambda ms: None if ms is None else class_of(ms))
    kept = "record_id, time_us, model, request_id, trace_id, status, finish_reason, duration_ms, ttft_ms, body"
    connection.exec_driver_sql(
        f"INSERT INTO records ({kept}, duration_class, ttft_class, client, of_call)"  # noqa: S608  # of names alone
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


# Version of a file → its migration to the current schema.
_MIGRATIONS: dict[int, Callable[[sql.Connection], None]] = {1: _from_1, 2: _add_columns}
