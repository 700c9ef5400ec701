"""The tables of the payload log in SQLite and PostgreSQL, and what the statements on them share.

`records` holds each record as its serialized protobuf beside the columns that queries filter by. `position` is the
order of commit, never reused. Every index ends in `time_us` and, like all of SQLite's, in `position`: matches are in
the order of queries. `of_call` marks a record of only the gateway's access log, and whether a service's record of the
same call may still replace it. `calls` holds the gateway's part of a call, by the gateway's call id; without contents
if the call's records were deleted. `appended` holds the received sequences of each source, apart from the records: a
deleted record does not return. `deletions` holds requested deletions, for records that arrive later; `number` is their
order. `cursors` holds the positions of readers of all records. `shares` holds the space of each client's records, with
refused requests separately: see shares.py. `usage` holds sums over the services' records, apart from the records too:
see usage.py.

Times are whole microseconds since 1970, hours whole hours since then.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from headrace.errors import StartupError

T = TypeVar("T")

# Of the tables: another layout is another version.
SCHEMA_VERSION = 6

# Values of `of_call`: a service's record; a call's record for good; a call's record until a service's record arrives.
NOT_OF_CALL, OF_CALL, OF_CALL_FOR_NOW = 0, 1, 2

_MAX_LIST = 10_000  # Parameters in a statement; both databases take three times as many.

metadata = sql.MetaData()
# Compared byte by byte, whatever the database's locale.
_TEXT = sql.String().with_variant(sql.Text(collation="C"), "postgresql")
# SQLite numbers only columns of exactly this type.
_NUMBER = sql.BigInteger().with_variant(sql.Integer(), "sqlite")
_INDEXED = ("model", "request_id", "trace_id", "client", "status", "finish_reason")  # Columns of records.


schema_version = sql.Table("schema_version", metadata, sql.Column("version", sql.Integer, nullable=False))
records = sql.Table(
    "records",
    metadata,
    sql.Column("position", _NUMBER, primary_key=True),
    sql.Column("record_id", _TEXT, nullable=False, unique=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    *(sql.Column(name, _TEXT, nullable=False) for name in _INDEXED),
    sql.Column("duration_ms", sql.Double),
    sql.Column("duration_class", sql.Integer),
    sql.Column("ttft_ms", sql.Double),
    sql.Column("ttft_class", sql.Integer),
    sql.Column("call_id", _TEXT),
    sql.Column("of_call", sql.Integer, nullable=False),
    # Whether the request was refused, or left by its caller, before any output.
    sql.Column("refused", sql.Boolean, nullable=False),
    sql.Column("body", sql.LargeBinary, nullable=False),
    *(sql.Index(f"records_by_{name}", name, "time_us") for name in _INDEXED),
    # For scans of the newest records: it contains every column that they compare.
    sql.Index("records_by_time", "time_us", "position", "duration_ms", "ttft_ms"),
    sql.Index("records_by_duration", "duration_class"),
    sql.Index("records_by_ttft", "ttft_class"),
    sqlite_autoincrement=True,
)
calls = sql.Table(
    "calls",
    metadata,
    sql.Column("call_id", _TEXT, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("gateway", sql.LargeBinary),
    sqlite_with_rowid=False,
)
sources = sql.Table(
    "sources",
    metadata,
    sql.Column("source_id", _NUMBER, primary_key=True),
    sql.Column("source", _TEXT, nullable=False, unique=True),
)
appended = sql.Table(
    "appended",
    metadata,
    sql.Column("source_id", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("sequence", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
deletions = sql.Table(
    "deletions",
    metadata,
    sql.Column("number", _NUMBER, primary_key=True),
    sql.Column("client", _TEXT, nullable=False),
    sql.Column("key", _TEXT, nullable=False),
    sql.Column("value", _TEXT, nullable=False),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.UniqueConstraint("client", "key", "value"),
    sqlite_autoincrement=True,
)
cursors = sql.Table(
    "cursors",
    metadata,
    sql.Column("name", _TEXT, primary_key=True),
    sql.Column("position", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
# Updated at each commit: with room in its pages, PostgreSQL updates in place.
shares = sql.Table(
    "shares",
    metadata,
    sql.Column("client", _TEXT, primary_key=True),
    sql.Column("refused", sql.Boolean, primary_key=True),
    sql.Column("bytes", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 50},
)
usage = sql.Table(
    "usage",
    metadata,
    sql.Column("client", _TEXT, primary_key=True),
    sql.Column("hour", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("model", _TEXT, primary_key=True),
    *(
        sql.Column(name, sql.BigInteger, nullable=False)
        for name in (
            *("requests", "failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
            *("duration_us", "engine_us"),
        )
    ),
    # For UsageSums, which asks only a shared database.
    sql.Index("usage_by_model", "model").ddl_if(dialect="postgresql"),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 80},
)
# Conditions of partial indexes, for which a query's must be written like them.
REFUSED, _NAMED, DELETED = records.c.refused == sql.true(), records.c.call_id.is_not(None), calls.c.gateway.is_(None)
sql.Index("records_refused", records.c.client, records.c.time_us, sqlite_where=REFUSED, postgresql_where=REFUSED)
sql.Index("records_by_call", records.c.call_id, sqlite_where=_NAMED, postgresql_where=_NAMED)
sql.Index("calls_deleted", calls.c.time_us, sqlite_where=DELETED, postgresql_where=DELETED)


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000


def is_postgresql(connection: sql.Connection) -> bool:
    return connection.dialect.name == "postgresql"


def prepare(connection: sql.Connection, name: str) -> None:
    """Creates the tables in an empty database; raises StartupError if it has those of another version."""
    if (version := version_of(connection)) is None:
        metadata.create_all(connection)
        connection.execute(sql.insert(schema_version), {"version": SCHEMA_VERSION})
    else:
        check_version(version, name)


def version_of(connection: sql.Connection) -> int | None:
    """The schema's version; None: the database has no payload log."""
    has = sql.inspect(connection).has_table
    if has(schema_version.name):
        return connection.scalar(sql.select(schema_version.c.version))
    return 0 if has(records.name) else None


def check_version(version: int | None, name: str) -> None:
    """Raises StartupError if the version is not this one."""
    if version is None:
        raise StartupError(f"{name} is not a payload log of this version: start this logger with it once")
    if version != SCHEMA_VERSION:
        other = "a newer" if version > SCHEMA_VERSION else "an older"
        raise StartupError(
            f"{name} has schema version {version}, this logger knows {SCHEMA_VERSION}:"
            f" start a logger of {other} version, or name another database"
        )


def among(
    connection: sql.Connection, column: sql.ColumnElement[Any], values: Collection[Any], *conditions: Any
) -> list[Any]:
    """Those of the values that a column has, in rows that fulfil the conditions."""
    found: list[Any] = []
    for some in lists(values):
        found += connection.scalars(sql.select(column).distinct().where(*conditions, column.in_(some)))
    return found


def lists(values: Collection[T]) -> Iterator[list[T]]:
    """The values in lists that a statement can have as parameters."""
    listed = list(values)
    for begin in range(0, len(listed), _MAX_LIST):
        yield listed[begin : begin + _MAX_LIST]


def upsert(
    connection: sql.Connection,
    into: sql.Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    added: tuple[str, ...] = (),
    replaced: tuple[str, ...] = (),
) -> None:
    """Inserts rows with different keys; in a row that is there, adds to some columns and replaces others."""
    if rows:
        connection.execute(_upsert(connection.dialect.name, into, added, replaced), rows)


@lru_cache
def _upsert(dialect: str, into: sql.Table, added: tuple[str, ...], replaced: tuple[str, ...]) -> sql.Insert:
    insert = postgresql.insert(into) if dialect == "postgresql" else sqlite.insert(into)
    new = insert.excluded
    changed = {name: into.c[name] + new[name] for name in added} | {name: new[name] for name in replaced}
    return insert.on_conflict_do_update(index_elements=list(into.primary_key), set_=changed)
