"""Requested deletions, which also apply to records that arrive later.

A record waits in a spool until the logger has it, and the record of a request in flight is written at its end. So a
deletion covers, besides the records in the store, every later record with its key whose request arrived before the
deletion. Deletions are kept for as long as sequences (`removing.forget_some`), up to a maximum number.

Belongs to the writer's thread.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sql

from millrace_protos.millrace_pb2 import PayloadRecord
from services.logger.store.filters import columns_of

MAX_DELETIONS = 100_000
_MAX_KEPT = 63  # Characters: fewer than a digest has.
_KEYS = ("record_id", "request_id", "client")


class Deletions:
    """The table `deletions`, with a copy in memory, where every new record is looked up."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}  # The time of each request, oldest first.

    def load(self, connection: sql.Connection) -> None:
        rows = connection.exec_driver_sql("SELECT key, value, time_us FROM deletions ORDER BY time_us").all()
        self._times = {(row.key, row.value): row.time_us for row in rows}

    def add(self, connection: sql.Connection, key: str, value: str, now_us: int) -> None:
        """Adds a deletion; above the maximum the oldest is dropped."""
        value = _kept(value)
        self._times.pop((key, value), None)
        self._times[key, value] = now_us
        connection.exec_driver_sql(
            "INSERT OR REPLACE INTO deletions (key, value, time_us) VALUES (?, ?, ?)", (key, value, now_us)
        )
        if len(self._times) > MAX_DELETIONS:
            oldest = next(iter(self._times))
            del self._times[oldest]
            connection.exec_driver_sql("DELETE FROM deletions WHERE key = ? AND value = ?", oldest)

    def cover(self, record: PayloadRecord) -> bool:
        """Whether a record that arrives now was deleted before it arrived."""
        if not self._times:
            return False
        times = [self._times.get((key, _kept(getattr(record, key)))) for key in _KEYS]
        known = [time_us for time_us in times if time_us is not None]
        return bool(known) and (times[0] is not None or columns_of(record)["time_us"] <= max(known))


def _kept(value: str) -> str:
    """The stored form of a key: its digest if it is long, because callers choose the length."""
    return value if len(value) <= _MAX_KEPT else hashlib.sha256(value.encode()).hexdigest()
