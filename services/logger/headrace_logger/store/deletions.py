"""Requested deletions, which also apply to records that arrive later.

A record waits in a spool until the logger has it, and the record of a request in flight is written at its end. So a
deletion covers, besides the records in the store, every later record with its key whose request arrived before the
deletion. Deletions are kept for as long as sequences (`removing.forget_some`), up to a maximum number. A client's own
deletion covers only its own records, and above the maximum it displaces no deletion of a client with fewer.

In PostgreSQL other loggers add deletions too; by the column `number`, in their order, `refresh` reads the new ones.

Belongs to the writer's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sql

from headrace_logger.store.filters import columns_of
from headrace_logger.store.statements import is_postgresql, run
from headrace_protos.headrace_pb2 import PayloadRecord

MAX_DELETIONS = 100_000
_MAX_KEPT = 63  # Characters: fewer than a digest has.
_KEYS = ("record_id", "request_id", "client")
_OF = " of "  # In the table's column `key`: between the name of the key and the client whose records are covered.

_Key = tuple[str, str]  # The key's name and the stored form of its value.


class Deletions:
    """The table `deletions`, with a copy in memory, where every new record is looked up."""

    def __init__(self) -> None:
        # The time of each request, oldest first, by the client whose records are covered; "" covers all clients.
        self._times: dict[str, dict[_Key, int]] = {}
        self._count = 0
        self._read_up_to = 0

    def load(self, connection: sql.Connection) -> None:
        self._times, self._count, self._read_up_to = {}, 0, 0
        if is_postgresql(connection):
            self.refresh(connection)
            return
        for row in run(connection, "SELECT key, value, time_us FROM deletions ORDER BY time_us"):
            self._put_row(row)

    def refresh(self, connection: sql.Connection) -> None:
        """Reads the deletions that other loggers have added since; only this one writes to an SQLite file."""
        if is_postgresql(connection):
            new = "SELECT key, value, time_us, number FROM deletions WHERE number > ? ORDER BY number"
            for row in run(connection, new, self._read_up_to):
                self._put_row(row)
                self._read_up_to = row.number

    def add(self, connection: sql.Connection, key: str, value: str, client: str, now_us: int) -> None:
        """Adds a deletion for a client, or for all if it is empty; above the maximum an old one is dropped."""
        self.refresh(connection)
        value = _kept(value)
        self._put(client, (key, value), now_us)
        # Not replaced in place: a new row has a new number.
        run(connection, "DELETE FROM deletions WHERE key = ? AND value = ?", _column(key, client), value)
        new = "INSERT INTO deletions (key, value, time_us) VALUES (?, ?, ?)"
        run(connection, new, _column(key, client), value, now_us)
        if self._count > MAX_DELETIONS:
            most = max(self._times, key=lambda one: len(self._times[one]))
            key, value = next(iter(self._times[most]))
            self._drop(most, (key, value))
            run(connection, "DELETE FROM deletions WHERE key = ? AND value = ?", _column(key, most), value)

    def cover(self, record: PayloadRecord) -> bool:
        """Whether a record that arrives now was deleted before it arrived."""
        return any(_covers(self._times[client], record) for client in {"", record.client} if client in self._times)

    def _put_row(self, row: sql.Row[Any]) -> None:
        key, _, client = row.key.partition(_OF)
        self._put(client, (key, row.value), row.time_us)

    def _put(self, client: str, key: _Key, time_us: int) -> None:
        self._drop(client, key)
        self._times.setdefault(client, {})[key] = time_us
        self._count += 1

    def _drop(self, client: str, key: _Key) -> None:
        times = self._times.get(client, {})
        if times.pop(key, None) is not None:
            self._count -= 1
            if not times:
                del self._times[client]


def _covers(deleted: Mapping[_Key, int], record: PayloadRecord) -> bool:
    times = [deleted.get((key, _kept(getattr(record, key)))) for key in _KEYS]
    known = [time_us for time_us in times if time_us is not None]
    return bool(known) and (times[0] is not None or columns_of(record)["time_us"] <= max(known))


def _column(key: str, client: str) -> str:
    return f"{key}{_OF}{client}" if client else key


def _kept(value: str) -> str:
    """The stored form of a key: its digest if it is long, because callers choose the length, or has a NUL."""
    return value if len(value) <= _MAX_KEPT and "\0" not in value else hashlib.sha256(value.encode()).hexdigest()
