"""Removes records from the tables of tables.py (deletion, expiry, forgetting), and returns an SQLite file's free space.

Each function does a bounded part of its work, so that other writes can run in between, and returns whether it did any.
The first three run within the transaction of their connection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sql

from headrace_logger.store.schema import BUSY_MS
from headrace_logger.store.statements import IN_EACH, column, each, is_postgresql, run, upsert
from headrace_logger.store.tables import BESIDES_BODY, calls, now_us, records

_RECORDS = 200
_SEQUENCES = 10_000
_PAGES = 1_000
# A reader can keep the log from being truncated; this is the longest wait for it.
_LOG_BUSY_MS = 100

# The share of the database above which refused requests are deleted first, however new they are.
_REFUSED_SHARE = 1 / 8

_Rows = Sequence[Any]

_OLDEST = (
    sql.select(
        *(records.c.position, records.c.call_id, records.c.of_call), sql.func.length(records.c.body).label("bytes")
    )
    .order_by(records.c.time_us, records.c.position)
    .limit(_RECORDS)
)
_LARGEST = "SELECT client FROM shares GROUP BY client ORDER BY sum(bytes) DESC LIMIT 1"
_LARGEST_REFUSED = "SELECT client FROM shares WHERE refused ORDER BY bytes DESC LIMIT 1"


def delete_some(connection: sql.Connection, chosen: sql.ColumnElement[bool]) -> int:
    """Deletes some of the chosen records; later lines of the gateway for their calls will be ignored."""
    rows = connection.execute(sql.select(records.c.position, records.c.call_id).where(chosen).limit(_RECORDS)).all()
    take_no_more_of_calls(connection, _delete(connection, rows))
    return len(rows)


def take_no_more_of_calls(connection: sql.Connection, call_ids: Iterable[str]) -> None:
    """Marks calls so that the gateway's later lines for them are ignored."""
    if tombstones := [(call_id, now_us()) for call_id in call_ids]:
        forgotten = "ON CONFLICT (call_id) DO UPDATE SET time_us = excluded.time_us, gateway = NULL"
        upsert(connection, calls, ("call_id", "time_us"), tombstones, forgotten)


def named_by_records(connection: sql.Connection, call_ids: Collection[str]) -> set[str]:
    """Those of the calls that records name."""
    named = f"SELECT call_id FROM records WHERE call_id {IN_EACH}"  # noqa: S608
    return set(column(connection, named, each(connection, call_ids)))


def expire_some(connection: sql.Connection, before_us: int | None, max_bytes: int | None) -> list[int]:
    """Deletes some of the oldest records, those before a time or above a size; returns their positions.

    Above the size, refused requests go first if they exceed their share: those of the client with most of them. Then
    the client whose records take most space loses its oldest. No client displaces records of a client with fewer.
    Records of only the gateway's line count as position 0.
    """
    rows: _Rows = ()
    if before_us is not None:
        rows = connection.execute(_OLDEST.where(records.c.time_us < before_us)).all()
    if not rows and max_bytes is not None and (excess := _bytes_used(connection) - max_bytes) > 0:
        chosen = _first_to_go(connection, max_bytes)
        # What PostgreSQL's excess counts besides bodies; of SQLite's pages only bodies are known.
        besides = BESIDES_BODY if is_postgresql(connection) else 0
        rows = _first(connection.execute(_OLDEST.where(*chosen)).all(), excess, besides)
        rows = rows or _first(connection.execute(_OLDEST).all(), excess, besides)
    _delete(connection, rows)
    return [0 if row.of_call else row.position for row in rows]


def forget_some(connection: sql.Connection, before_us: int) -> int:
    """Forgets some of the received sequences, and of the deleted calls, before a time.

    A source's sequences ascend with time, so the oldest are its first.
    """
    forgotten = 0
    for source_id in column(connection, "SELECT source_id FROM sources"):
        first = "SELECT sequence, time_us FROM appended WHERE source_id = ? ORDER BY sequence LIMIT ?"
        sequences = column(
            connection,
            f"SELECT sequence FROM ({first}) AS oldest WHERE time_us < ?",  # noqa: S608
            *(source_id, _SEQUENCES, before_us),
        )
        if sequences:
            forgotten += len(sequences)
            received = f"DELETE FROM appended WHERE source_id = ? AND sequence {IN_EACH}"  # noqa: S608
            run(connection, received, source_id, each(connection, sequences))
    run(
        connection,
        "DELETE FROM sources WHERE NOT EXISTS (SELECT 1 FROM appended WHERE appended.source_id = sources.source_id)",
    )
    deleted = "SELECT call_id FROM calls WHERE gateway IS NULL AND time_us < ? LIMIT ?"
    call_ids = column(connection, deleted, before_us, _SEQUENCES)
    _delete_calls(connection, call_ids)
    run(connection, "DELETE FROM shares WHERE bytes <= 0")
    run(connection, "DELETE FROM deletions WHERE time_us < ?", before_us)
    return forgotten + len(call_ids)


def give_back_some(engine: sql.Engine) -> bool:
    """Returns some free pages of the file to the file system."""
    with engine.connect() as connection:
        before = _pragma(connection, "freelist_count")
        # The driver executes a statement without columns only for its first row, which is one page; a script it
        # executes fully.
        connection.connection.executescript(f"PRAGMA incremental_vacuum({_PAGES})")
        return 0 < _pragma(connection, "freelist_count") < before


def empty_log(engine: sql.Engine) -> None:
    """Moves the write-ahead log's contents to the file and truncates the log; a slow reader prevents the truncation."""
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {_LOG_BUSY_MS}")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_MS}")


def _delete(connection: sql.Connection, rows: _Rows) -> list[str]:
    """Deletes records, and the gateway's lines of calls that no record names any more; returns these calls' ids."""
    positions = each(connection, [row.position for row in rows])
    run(connection, f"DELETE FROM records WHERE position {IN_EACH}", positions)  # noqa: S608
    call_ids = {row.call_id for row in rows if row.call_id is not None}
    unnamed = list(call_ids - named_by_records(connection, call_ids))
    _delete_calls(connection, unnamed)
    return unnamed


def _delete_calls(connection: sql.Connection, call_ids: Collection[str]) -> None:
    run(connection, f"DELETE FROM calls WHERE call_id {IN_EACH}", each(connection, call_ids))  # noqa: S608


def _first_to_go(connection: sql.Connection, max_bytes: int) -> Sequence[sql.ColumnElement[bool]]:
    """The conditions of the records that are deleted next for space."""
    (refused_bytes,) = column(connection, "SELECT coalesce(sum(bytes), 0) FROM shares WHERE refused")
    if refused_bytes > max_bytes * _REFUSED_SHARE:
        (client,) = column(connection, _LARGEST_REFUSED)
        # Written like the condition of the index.
        return records.c.client == client, sql.text("refused")  # type: ignore[return-value]
    return [records.c.client == client for client in column(connection, _LARGEST)]


def _first(rows: _Rows, excess: int, besides: int) -> _Rows:
    """The first rows that have `excess` bytes together, each with some besides its body."""
    for count, row in enumerate(rows):
        if excess <= 0:
            return rows[:count]
        excess -= row.bytes + besides
    return rows


def _bytes_used(connection: sql.Connection) -> int:
    if is_postgresql(connection):
        # Its files do not shrink when records are deleted.
        return int(column(connection, "SELECT coalesce(sum(bytes), 0) FROM shares")[0])
    pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
    return pages * _pragma(connection, "page_size")


def _pragma(connection: sql.Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
