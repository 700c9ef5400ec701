"""Adds and removes rows of `records`, and the space that each client's records take, in `shares`.

Removes what is too old or too much, and forgets what no spool can send any more. Each function runs within the
transaction of its connection. `expire_some` and `forget_some` do a bounded part of their work, so that other writes can
run in between, and return what they did.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sql

from headrace_logger.store.tables import (
    DELETED,
    REFUSED,
    among,
    appended,
    calls,
    deletions,
    is_postgresql,
    now_us,
    records,
    shares,
    sources,
    upsert,
)

BESIDES_BODY = 600  # An estimate of a record's space besides its body: columns and index entries.
# The share of the database above which refused requests are deleted first, however new they are.
_REFUSED_SHARE = 1 / 8

SIZE = sql.func.length(records.c.body).label("size")
_REMOVED = (records.c.position, records.c.call_id, records.c.of_call, records.c.client, records.c.refused, SIZE)
_TOTAL = sql.select(sql.func.coalesce(sql.func.sum(shares.c.bytes), 0))
_REFUSED_SHARES = shares.c.refused == sql.true()
_LARGEST = sql.select(shares.c.client).group_by(shares.c.client).order_by(sql.func.sum(shares.c.bytes).desc()).limit(1)

_RECORDS = 200
_SEQUENCES = 10_000

_Rows = Sequence[Any]

_OLDEST = (
    sql.select(records.c.position, records.c.of_call, SIZE)
    .order_by(records.c.time_us, records.c.position)
    .limit(_RECORDS)
)


def add(connection: sql.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows, which have the same names in the same order."""
    if rows:
        # An insert by SQLAlchemy takes a fifth of a record's time to put its values in place.
        names, mark = rows[0].keys(), "%s" if is_postgresql(connection) else "?"
        into = f"INSERT INTO {records.name} ({', '.join(names)}) VALUES ({', '.join(mark for _ in names)})"  # noqa: S608
        connection.exec_driver_sql(into, [tuple(row.values()) for row in rows])
        _count(connection, ((row["client"], row["refused"], len(row["body"])) for row in rows), 1)


def remove(connection: sql.Connection, chosen: sql.ColumnElement[bool]) -> Sequence[Any]:
    """Deletes rows; returns what is needed for their calls and for their number."""
    rows = connection.execute(sql.delete(records).where(chosen).returning(*_REMOVED)).all()
    _count(connection, ((row.client, row.refused, row.size) for row in rows), -1)
    return rows


def remove_with_calls(connection: sql.Connection, positions: Sequence[int]) -> Collection[str]:
    """Deletes records, and the gateway's lines of calls that no record names any more; returns these calls' ids."""
    if not positions:
        return ()
    removed = remove(connection, records.c.position.in_(positions))
    unnamed = unnamed_calls(connection, {row.call_id for row in removed if row.call_id is not None})
    if unnamed:
        connection.execute(sql.delete(calls).where(calls.c.call_id.in_(unnamed)))
    return unnamed


def unnamed_calls(connection: sql.Connection, call_ids: Collection[str]) -> set[str]:
    """Those of the calls that no record names."""
    return set(call_ids).difference(among(connection, records.c.call_id, call_ids))


def take_no_more_of_calls(connection: sql.Connection, call_ids: Iterable[str]) -> None:
    """Marks calls so that the gateway's later lines for them are ignored."""
    marked = [{"call_id": call_id, "time_us": now_us(), "gateway": None} for call_id in call_ids]
    upsert(connection, calls, marked, replaced=("time_us", "gateway"))


def bytes_used(connection: sql.Connection) -> int:
    """The size that a limit is for: of SQLite's pages in use; of PostgreSQL's records, as its files do not shrink."""
    if is_postgresql(connection):
        return int(connection.execute(_TOTAL).scalar_one())
    pragmas = ("page_count", "freelist_count", "page_size")
    pages, free, size = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas)
    return int((pages - free) * size)


def first_to_go(connection: sql.Connection, max_bytes: int) -> Sequence[sql.ColumnElement[bool]]:
    """The conditions of the records that are deleted next for space."""
    if connection.execute(_TOTAL.where(_REFUSED_SHARES)).scalar_one() > max_bytes * _REFUSED_SHARE:
        return records.c.client == connection.scalar(_LARGEST.where(_REFUSED_SHARES)), REFUSED
    return [records.c.client == client for client in connection.scalars(_LARGEST)]


def forget_empty(connection: sql.Connection) -> None:
    connection.execute(sql.delete(shares).where(shares.c.bytes <= 0))


def _count(connection: sql.Connection, rows: Iterable[tuple[str, bool, int]], sign: int) -> None:
    sums: Counter[tuple[str, bool]] = Counter()
    for client, refused, size in rows:
        sums[client, refused] += sign * (size + BESIDES_BODY)
    changes = [{"client": client, "refused": refused, "bytes": count} for (client, refused), count in sums.items()]
    upsert(connection, shares, changes, added=("bytes",))


def expire_some(connection: sql.Connection, before_us: int | None, max_bytes: int | None) -> list[int]:
    """Deletes some of the oldest records, those before a time or above a size; returns their positions.

    Above the size, refused requests go first if they exceed their share: those of the client with most of them. Then
    the client whose records take most space loses its oldest. No client displaces records of a client with fewer.
    Records of only the gateway's line count as position 0.
    """
    rows: _Rows = ()
    if before_us is not None:
        rows = connection.execute(_OLDEST.where(records.c.time_us < before_us)).all()
    if not rows and max_bytes is not None and (excess := bytes_used(connection) - max_bytes) > 0:
        chosen = first_to_go(connection, max_bytes)
        # What PostgreSQL's excess counts besides bodies; of SQLite's pages only bodies are known.
        besides = BESIDES_BODY if is_postgresql(connection) else 0
        rows = _first(connection.execute(_OLDEST.where(*chosen)).all(), excess, besides)
        rows = rows or _first(connection.execute(_OLDEST).all(), excess, besides)
    remove_with_calls(connection, [row.position for row in rows])
    return [0 if row.of_call else row.position for row in rows]


def forget_some(connection: sql.Connection, before_us: int) -> int:
    """Forgets some of the received sequences, and of the deleted calls, before a time.

    A source's sequences ascend with time, so the oldest are its first.
    """
    forgotten = 0
    for source_id in connection.scalars(sql.select(sources.c.source_id)).all():
        of_source = appended.c.source_id == source_id
        first = sql.select(appended.c.sequence, appended.c.time_us).where(of_source).order_by(appended.c.sequence)
        oldest = first.limit(_SEQUENCES).subquery()
        old = sql.select(oldest.c.sequence).where(oldest.c.time_us < before_us)
        forgotten += connection.execute(sql.delete(appended).where(of_source, appended.c.sequence.in_(old))).rowcount
    deleted = sql.select(calls.c.call_id).where(DELETED, calls.c.time_us < before_us)
    old = deleted.limit(_SEQUENCES)
    forgotten += connection.execute(sql.delete(calls).where(calls.c.call_id.in_(old))).rowcount
    silent = ~sql.exists().where(appended.c.source_id == sources.c.source_id)
    connection.execute(sql.delete(sources).where(silent))
    forget_empty(connection)
    connection.execute(sql.delete(deletions).where(deletions.c.time_us < before_us))
    return forgotten


def _first(rows: _Rows, excess: int, besides: int) -> _Rows:
    """The first rows that have `excess` bytes together, each with some besides its body."""
    for count, row in enumerate(rows):
        if excess <= 0:
            return rows[:count]
        excess -= row.size + besides
    return rows
