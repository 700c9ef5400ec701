"""Requested deletions: of the stored records, and of records that arrive later.

A record waits in a spool until the logger has it, and the record of a request in flight is written at its end. So a
deletion covers, besides the records in the store, every later record with its key whose request arrived before the
deletion. Deletions are kept for as long as sequences (`shares.forget_some`), up to a maximum number. A client's own
deletion covers only its own records, and above the maximum it displaces no deletion of a client with fewer.

In PostgreSQL other loggers add deletions too; by the column `number`, in their order, `refresh` reads the new ones.

Belongs to the writer's thread.
"""

import hashlib
from collections.abc import Mapping

import sqlalchemy as sql

from headrace_logger.store import shares
from headrace_logger.store.filters import columns_of
from headrace_logger.store.tables import deletions, records
from headrace_protos.headrace_pb2 import PayloadRecord

MAX_DELETIONS = 100_000
_MAX_KEPT = 63  # Characters: fewer than a digest has.
_KEYS = ("record_id", "request_id", "client")
_RECORDS = 200

_Key = tuple[str, str]  # The key's name and the stored form of its value.


def delete_some(connection: sql.Connection, chosen: sql.ColumnElement[bool]) -> int:
    """Deletes some of the chosen records; later lines of the gateway for their calls will be ignored."""
    positions = connection.scalars(sql.select(records.c.position).where(chosen).limit(_RECORDS)).all()
    shares.take_no_more_of_calls(connection, shares.remove_with_calls(connection, positions))
    return len(positions)


class Deletions:
    """The table `deletions`, with a copy in memory, where every new record is looked up."""

    def __init__(self) -> None:
        # The time of each request, oldest first, by the client whose records are covered; "" covers all clients.
        self._times: dict[str, dict[_Key, int]] = {}
        self._count = 0
        self._read_up_to = 0

    def load(self, connection: sql.Connection) -> None:
        self._times, self._count, self._read_up_to = {}, 0, 0
        self.refresh(connection)

    def refresh(self, connection: sql.Connection) -> None:
        """Reads the deletions that this or another logger has added since."""
        new = sql.select(deletions).where(deletions.c.number > self._read_up_to).order_by(deletions.c.number)
        for row in connection.execute(new):
            self._put(row.client, (row.key, row.value), row.time_us)
            self._read_up_to = row.number

    def add(self, connection: sql.Connection, key: str, value: str, client: str, now_us: int) -> None:
        """Adds a deletion for a client, or for all if it is empty; above the maximum an old one is dropped."""
        self.refresh(connection)
        value = _kept(value)
        # Not replaced in place: a new row has a new number.
        _forget(connection, client, (key, value))
        connection.execute(sql.insert(deletions), {"client": client, "key": key, "value": value, "time_us": now_us})
        self.refresh(connection)
        if self._count > MAX_DELETIONS:
            most = max(self._times, key=lambda one: len(self._times[one]))
            oldest = next(iter(self._times[most]))
            self._drop(most, oldest)
            _forget(connection, most, oldest)

    def cover(self, record: PayloadRecord) -> bool:
        """Whether a record that arrives now was deleted before it arrived."""
        return any(_covers(self._times[client], record) for client in {"", record.client} if client in self._times)

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


def _forget(connection: sql.Connection, client: str, key: _Key) -> None:
    columns = sql.tuple_(deletions.c.client, deletions.c.key, deletions.c.value)
    connection.execute(sql.delete(deletions).where(columns == (client, *key)))


def _kept(value: str) -> str:
    """The stored form of a key: its digest if it is long, because callers choose the length, or has a NUL."""
    return value if len(value) <= _MAX_KEPT and "\0" not in value else hashlib.sha256(value.encode()).hexdigest()
