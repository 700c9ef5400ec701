"""A snapshot of a database's records, read without its logger, which may be running.

    with Snapshot(path, filters) as snapshot:
        for record in snapshot.records(): ...

Oldest first, by the records' times. Records committed later are not included; records deleted meanwhile are missing.
Rows are read in transactions that end before their records are returned, so a slow reader does not keep the logger from
truncating its write-ahead log; at most 4 MiB, or one record, at a time.

Errors: StartupError if the file cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from millrace.errors import StartupError
from millrace_protos.millrace_pb2 import PayloadRecord
from services.logger.store import reading, schema
from services.logger.store.filters import Filters
from services.logger.store.tables import records

_ROWS = 500
_BYTES = 4 * 1024 * 1024


class Snapshot:
    """The records of a file that pass the filters."""

    def __init__(self, path: Path, filters: Filters) -> None:
        if not path.is_file():
            raise StartupError(f"{path}: no such database; LOGGER_DATABASE or --database names the logger's")
        self._path = path
        self._engine = schema.open_for_reading(path, 1)
        with self._connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            schema.check_version(path, version)
            if version < schema.SCHEMA_VERSION:
                raise StartupError(
                    f"{path} is not a payload log, or has an older schema: start this logger with it once"
                )
            last = connection.execute(sql.select(sql.func.max(records.c.position))).scalar_one() or 0
        self._clauses = [records.c.position <= last, *filters.clauses(records)]

    def count(self) -> int:
        with self._connect() as connection:
            statement = sql.select(sql.func.count()).select_from(records).where(*self._clauses)
            return int(connection.execute(statement).scalar_one())

    def records(self) -> Iterator[PayloadRecord]:
        """Yields each record with the gateway's part."""
        last: reading.Place | None = None
        while rows := self._page(last):
            for row in rows:
                if not reading.may_be_replaced(row):
                    yield reading.Found(row.body, row.gateway).record
            last = reading.Place(rows[-1].time_us, rows[-1].position)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.dispose()

    def _page(self, last: reading.Place | None) -> Sequence[Any]:
        clauses = list(self._clauses)
        if last is not None:
            # The first of the two is for the index.
            clauses.append(records.c.time_us >= last.time_us)
            clauses.append((records.c.time_us > last.time_us) | (records.c.position > last.position))
        # Without the bodies, which SQLite would otherwise hold in memory to sort them.
        order = (records.c.time_us, records.c.position)
        sizes = sql.select(records.c.position, sql.func.length(records.c.body).label("size")).where(*clauses)
        with self._connect() as connection:
            rows: Sequence[Any] = connection.execute(sizes.order_by(*order).limit(_ROWS)).all()
            chosen = [row.position for row in rows[: max(1, reading.fitting(rows, _BYTES))]]
            whole = reading.whole_rows().where(records.c.position.in_(reading.each_of(chosen)))
            return connection.execute(whole.order_by(*order)).all()

    @contextmanager
    def _connect(self) -> Iterator[sql.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise StartupError(f"{self._path}: {error.orig}") from None
