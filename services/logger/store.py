"""Where payload records lie.

`Store` is what the servicer needs; `SqliteStore` is the embedded one. A record is kept as its
serialized protobuf beside the columns that queries filter by, under its record_id, a UUIDv7, so
that the key's order is the order of arrival. `append` returns after the commit; a (source, sequence)
or record_id that is already there changes nothing.

Threads: all writes happen on one thread, reads on a few others, none on the event loop. A query
reads page by page, each in a transaction of its own, and holds none while its reader takes its time.

Errors: StartupError where the file cannot be used, NotReadyError where the database stops answering.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sqlalchemy as sql
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError

from millrace.errors import NotReadyError, StartupError
from millrace.protos.millrace_pb2 import AppendRequest, PayloadRecord
from services.logger.filters import Filters, columns_of

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1

_READERS = 4
_ROWS_PER_READ = 100

_metadata = sql.MetaData()
_records = sql.Table(
    "records",
    _metadata,
    sql.Column("record_id", sql.String, primary_key=True),
    sql.Column("source", sql.String, nullable=False),
    sql.Column("sequence", sql.BigInteger, nullable=False),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("model", sql.String, nullable=False),
    sql.Column("request_id", sql.String, nullable=False),
    sql.Column("trace_id", sql.String, nullable=False),
    sql.Column("status", sql.String, nullable=False),
    sql.Column("finish_reason", sql.String, nullable=False),
    sql.Column("duration_ms", sql.Double),
    sql.Column("ttft_ms", sql.Double),
    sql.Column("body", sql.LargeBinary, nullable=False),
    sql.UniqueConstraint("source", "sequence"),
    # Each with the key behind it: the matches lie in the order in which they are asked for.
    sql.Index("records_by_model", "model", "record_id"),
    sql.Index("records_by_request_id", "request_id", "record_id"),
    sql.Index("records_by_trace_id", "trace_id", "record_id"),
    sql.Index("records_by_status", "status", "record_id"),
    sql.Index("records_by_finish_reason", "finish_reason", "record_id"),
    # Ranges are scanned newest first, which this lets SQLite do without reading the rows themselves.
    sql.Index("records_by_range", "record_id", "time_us", "duration_ms", "ttft_ms"),
)
_column = _records.c

T = TypeVar("T")


class Store(Protocol):
    """Payload records by key and by filter."""

    async def append(self, requests: Sequence[AppendRequest]) -> list[PayloadRecord]:
        """Commits the records, all or none, and returns the new ones; those that are there already stay as they are."""
        ...

    async def get(self, record_id: str) -> PayloadRecord | None:
        """The record of that key."""
        ...

    def query(self, filters: Filters, before: str | None, limit: int) -> AsyncIterator[PayloadRecord]:
        """At most `limit` records that pass every filter, newest first, from the one before record_id `before`."""
        ...

    async def check(self) -> None:
        """Raises NotReadyError unless the store answers."""
        ...

    async def close(self) -> None:
        """Ends the threads after what they are doing and closes the database."""
        ...


class SqliteStore:
    """A `Store` in one SQLite file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._engine = _open(path)
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")

    async def append(self, requests: Sequence[AppendRequest]) -> list[PayloadRecord]:
        return await self._run(self._writer, self._insert, requests) if requests else []

    async def get(self, record_id: str) -> PayloadRecord | None:
        statement = sql.select(_column.record_id, _column.body).where(_column.record_id == record_id)
        rows = await self._run(self._readers, self._select, statement)
        return PayloadRecord.FromString(rows[0].body) if rows else None

    async def query(self, filters: Filters, before: str | None, limit: int) -> AsyncIterator[PayloadRecord]:
        clauses = filters.clauses(_records)
        newest_first = sql.select(_column.record_id, _column.body).where(*clauses).order_by(_column.record_id.desc())
        text = filters.text
        rows_per_read = _ROWS_PER_READ if text else min(limit, _ROWS_PER_READ)
        while True:
            page = newest_first if before is None else newest_first.where(_column.record_id < before)
            rows = await self._run(self._readers, self._select, page.limit(rows_per_read))
            for row in rows:
                # Protobuf keeps strings as they are: most rows without the text need no parsing.
                if text.encode() not in row.body:
                    continue
                record = PayloadRecord.FromString(row.body)
                if filters.has_text(record):
                    yield record
                    limit -= 1
                    if limit == 0:
                        return
            if len(rows) < rows_per_read:
                return
            before = rows[-1].record_id

    async def check(self) -> None:
        await self._run(self._readers, self._select, sql.select(_column.record_id).limit(1))

    async def close(self) -> None:
        for executor in (self._writer, self._readers):
            await asyncio.to_thread(executor.shutdown)
        self._engine.dispose()

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
        except DatabaseError as error:
            logger.error("the database failed: %s", error.orig)
            raise NotReadyError("the payload store does not answer") from error

    def _insert(self, requests: Sequence[AppendRequest]) -> list[PayloadRecord]:
        statement = insert(_records).on_conflict_do_nothing().returning(_column.record_id)
        with self._engine.begin() as connection:
            new = set(connection.execute(statement, [_row(request) for request in requests]).scalars())
        records: dict[str, PayloadRecord] = {}
        for request in requests:
            records.setdefault(request.record.record_id, request.record)
        return [record for record_id, record in records.items() if record_id in new]

    def _select(self, statement: sql.Select[Any]) -> Sequence[sql.Row[Any]]:
        with self._engine.connect() as connection:
            return connection.execute(statement).all()


def _row(request: AppendRequest) -> dict[str, Any]:
    return columns_of(request.record) | {
        "source": request.source,
        "sequence": request.sequence,
        "body": request.record.SerializeToString(),
    }


def _open(path: Path) -> sql.Engine:
    """An engine on the file, which is made, or checked to be ours, first."""
    engine = sql.create_engine(sql.URL.create("sqlite", database=str(path)))
    sql.event.listen(engine, "connect", _configure)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its -wal and -shm files the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        with engine.begin() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version > SCHEMA_VERSION:
                raise StartupError(
                    f"{path} has schema version {version}, this logger knows {SCHEMA_VERSION}: "
                    "start a newer logger or name another file in LOGGER_DATABASE"
                )
            _metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except OSError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.strerror}") from None
    except DatabaseError as error:
        raise StartupError(f"LOGGER_DATABASE={path}: {error.orig}") from None
    return engine


def _configure(connection: Any, _: object) -> None:
    # Readers never wait for the writer (WAL), and an acknowledged record survives a power cut (FULL).
    for setting in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000"):
        connection.execute(f"PRAGMA {setting}")
