"""Removes what is too old or too much, and forgets what no spool can send any more.

Each function runs within the transaction of its connection, does a bounded part of its work, so that other writes can
run in between, and returns what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sql

from headrace_logger.store import shares
from headrace_logger.store.tables import DELETED, appended, calls, deletions, is_postgresql, records, sources

_RECORDS = 200
_SEQUENCES = 10_000

_Rows = Sequence[Any]

_OLDEST = (
    sql.select(records.c.position, records.c.of_call, shares.SIZE)
    .order_by(records.c.time_us, records.c.position)
    .limit(_RECORDS)
)


def expire_some(connection: sql.Connection, before_us: int | None, max_bytes: int | None) -> list[int]:
    """Deletes some of the oldest records, those before a time or above a size; returns their positions.

    Above the size, refused requests go first if they exceed their share: those of the client with most of them. Then
    the client whose records take most space loses its oldest. No client displaces records of a client with fewer.
    Records of only the gateway's line count as position 0.
    """
    rows: _Rows = ()
    if before_us is not None:
        rows = connection.execute(_OLDEST.where(records.c.time_us < before_us)).all()
    if not rows and max_bytes is not None and (excess := shares.bytes_used(connection) - max_bytes) > 0:
        chosen = shares.first_to_go(connection, max_bytes)
        # What PostgreSQL's excess counts besides bodies; of SQLite's pages only bodies are known.
        besides = shares.BESIDES_BODY if is_postgresql(connection) else 0
        rows = _first(connection.execute(_OLDEST.where(*chosen)).all(), excess, besides)
        rows = rows or _first(connection.execute(_OLDEST).all(), excess, besides)
    shares.remove_with_calls(connection, [row.position for row in rows])
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
    shares.forget_empty(connection)
    connection.execute(sql.delete(deletions).where(deletions.c.time_us < before_us))
    return forgotten


def _first(rows: _Rows, excess: int, besides: int) -> _Rows:
    """The first rows that have `excess` bytes together, each with some besides its body."""
    for count, row in enumerate(rows):
        if excess <= 0:
            return rows[:count]
        excess -= row.size + besides
    return rows
