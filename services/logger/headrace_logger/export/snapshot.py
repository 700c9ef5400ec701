"""A snapshot of a database's records, read without its logger, which may be running.

    with closing(Snapshot(database, filters)) as snapshot:
        for record in snapshot.records(): ...

Oldest first, by the records' times. Records committed later are not included; records deleted meanwhile are missing.
`hours` and `records_of_hour` divide them, for exports that continue an earlier one.

Rows are read in transactions that end before their records are returned, so a slow reader does not keep the logger from
truncating its write-ahead log; at most 4 MiB, or one record, at a time.

Errors: StartupError if the database cannot be read.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from headrace.errors import StartupError
from headrace_logger.settings import Location
from headrace_logger.store import reading, sqlite
from headrace_logger.store.database import shown
from headrace_logger.store.filters import Filters
from headrace_logger.store.shares import SIZE
from headrace_logger.store.tables import OF_CALL_FOR_NOW, calls, check_version, now_us, records, version_of
from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest

_ROWS = 500
_BYTES = 4 * 1024 * 1024
_BATCH_ROWS, _BATCH_BYTES = 1000, 2 * 1024 * 1024
_HOUR_US = 3600 * 1_000_000


class Snapshot:
    """The records of a database that pass the filters.

    `last` is the highest position of a record, `last_ever` that of all there were.
    """

    def __init__(self, database: Location, filters: Filters) -> None:
        self._database = database
        self._engine = open_for_reading(database)
        with ExitStack() as undo, self._connect() as connection:
            undo.callback(self._engine.dispose)
            check_version(version_of(connection), name_of(database))
            self.last: int = reading.newest_position(connection)
            self.last_ever: int = reading.last_position(connection)
            undo.pop_all()
        self._clauses = [records.c.position <= self.last, *filters.clauses(records)]

    def count(self) -> int:
        with self._connect() as connection:
            statement = sql.select(sql.func.count()).select_from(records).where(*self._clauses)
            return int(connection.execute(statement).scalar_one())

    def hours(self) -> list[int]:
        """The hours since 1970 that have records, in order."""
        hour = records.c.time_us // _HOUR_US
        with self._connect() as connection:
            statement = sql.select(hour).distinct().select_from(records).where(records.c.time_us >= 0, *self._clauses)
            return sorted(connection.execute(statement).scalars())

    def final_position(self) -> int:
        """The position up to which no record will be replaced by a service's record of the same call."""
        called = calls.c.time_us > now_us() - int(reading.RECORD_LATE_S * 1_000_000)
        first = sql.select(sql.func.min(records.c.position)).join(calls, calls.c.call_id == records.c.call_id)
        with self._connect() as connection:
            found = connection.execute(first.where(called, records.c.of_call == OF_CALL_FOR_NOW)).scalar_one()
        return self.last if found is None else min(self.last, int(found) - 1)

    def records_of_hour(self, hour: int, after: int, up_to: int) -> Iterator[PayloadRecord]:
        """As `records`, of an hour, counted since 1970, and with positions above `after` and up to another one."""
        return self.records(
            records.c.time_us >= hour * _HOUR_US,
            records.c.time_us < (hour + 1) * _HOUR_US,
            records.c.position > after,
            records.c.position <= up_to,
        )

    def records(self, *conditions: sql.ColumnElement[bool]) -> Iterator[PayloadRecord]:
        """Yields each record that fulfils the conditions, with the gateway's part."""
        clauses = [*self._clauses, *conditions]
        last: reading.Place | None = None
        while rows := self._page(clauses, last):
            for row in rows:
                if not reading.may_be_replaced(row):
                    yield reading.Found(row.body, row.gateway).record
            last = reading.Place(rows[-1].time_us, rows[-1].position)

    def close(self) -> None:
        self._engine.dispose()

    def _page(self, clauses: list[sql.ColumnElement[bool]], last: reading.Place | None) -> Sequence[Any]:
        clauses = list(clauses)
        if last is not None:
            # The first of the two is for the index.
            clauses.append(records.c.time_us >= last.time_us)
            clauses.append((records.c.time_us > last.time_us) | (records.c.position > last.position))
        # Without the bodies, which SQLite would otherwise hold in memory to sort them.
        order = (records.c.time_us, records.c.position)
        sizes = sql.select(records.c.position, SIZE).where(*clauses)
        with self._connect() as connection:
            rows: Sequence[Any] = connection.execute(sizes.order_by(*order).limit(_ROWS)).all()
            chosen = [row.position for row in rows[: max(1, reading.fitting(rows, _BYTES))]]
            whole = reading.whole_rows().where(records.c.position.in_(chosen))
            return connection.execute(whole.order_by(*order)).all()

    @contextmanager
    def _connect(self) -> Iterator[sql.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise StartupError(f"{name_of(self._database)}: {' '.join(str(error.orig).split())}") from None


def filters_of(since: datetime | None, until: datetime | None, model: str | None = None) -> Filters:
    """The filters of an export; None is no bound."""
    bounds: dict[str, Any] = {"since": since, "until": until, "model": model}
    return Filters(QueryPayloadsRequest(**bounds))


def batches(records: Iterable[PayloadRecord]) -> Iterator[list[PayloadRecord]]:
    """The records in order, in batches for writers that encode many at once; a bound ends a batch."""
    batch: list[PayloadRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.ByteSize()
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_for_reading(location: Location) -> sql.Engine:
    """A read-only engine on a database, which may be another than a payload log; raises StartupError."""
    if isinstance(location, Path):
        if not location.is_file():
            raise StartupError(f"{location}: no such database; LOGGER_DATABASE or --database names the logger's")
        return sqlite.open_for_reading(location, 1)
    from headrace_logger.store.postgresql import engine_of

    return engine_of(sql.make_url(location.get_secret_value()), 1, reads_only=True)


def name_of(location: Location) -> str:
    """The database in messages."""
    return str(location) if isinstance(location, Path) else shown(sql.make_url(location.get_secret_value()))
