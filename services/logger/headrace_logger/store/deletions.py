"""Requested deletions: of the stored records, and of records that arrive later.

A record waits in a spool until the logger has it, and the record of a request in flight is written at its end. So a
deletion covers, besides the records in the store, every later record with its key whose request arrived before the
deletion. Deletions are kept for as long as sequences (`shares.forget_some`), up to a maximum number. A client's own
deletion covers only its own records, and above the maximum it displaces no deletion of a client with fewer.

Each function runs within the transaction of its connection.
"""

import hashlib
from collections.abc import Mapping, Sequence

import sqlalchemy as sql

from headrace_logger.store import shares
from headrace_logger.store.filters import columns_of
from headrace_logger.store.tables import deletions, lists, records
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord

MAX_DELETIONS = 100_000
_MAX_KEPT = 63  # Characters: fewer than a digest has.
_KEYS = ("record_id", "request_id", "client")
_RECORDS = 200

_Key = tuple[str, str, str]  # The client whose records are covered, the key's name, the stored form of its value.


def delete_some(connection: sql.Connection, chosen: sql.ColumnElement[bool]) -> int:
    """Deletes some of the chosen records; later lines of the gateway for their calls will be ignored."""
    positions = connection.scalars(sql.select(records.c.position).where(chosen).limit(_RECORDS)).all()
    shares.take_no_more_of_calls(connection, shares.remove_with_calls(connection, positions))
    return len(positions)


def add(connection: sql.Connection, key: str, value: str, client: str, now_us: int) -> None:
    """Adds a deletion for a client, or for all if it is empty; above the maximum an old one is dropped."""
    own = {"client": client, "key": key, "value": _kept(value)}
    # Not replaced in place: a new row has a new number.
    connection.execute(sql.delete(deletions).filter_by(**own))
    connection.execute(sql.insert(deletions), own | {"time_us": now_us})
    count = sql.func.count()
    if connection.execute(sql.select(count).select_from(deletions)).scalar_one() > MAX_DELETIONS:
        clients = sql.select(deletions.c.client).group_by(deletions.c.client)
        most = clients.order_by(count.desc()).limit(1).scalar_subquery()
        oldest = sql.select(sql.func.min(deletions.c.number)).where(deletions.c.client == most)
        connection.execute(sql.delete(deletions).where(deletions.c.number == oldest.scalar_subquery()))


def uncovered(connection: sql.Connection, requests: Sequence[AppendRequest]) -> list[AppendRequest]:
    """The requests whose records, which arrive now, were not deleted before."""
    if connection.scalar(sql.select(deletions.c.number).limit(1)) is None:
        return list(requests)
    clients = {"", *(request.record.client for request in requests)}
    times: dict[_Key, int] = {}
    for key in _KEYS:
        for some in lists({_kept(getattr(request.record, key)) for request in requests}):
            conditions = (deletions.c.client.in_(clients), deletions.c.key == key, deletions.c.value.in_(some))
            found = connection.execute(sql.select(deletions).where(*conditions))
            times |= {(row.client, key, row.value): row.time_us for row in found}
    return [request for request in requests if not _is_covered(request.record, times)]


def _is_covered(record: PayloadRecord, times: Mapping[_Key, int]) -> bool:
    for client in {"", record.client}:
        own = [times.get((client, key, _kept(getattr(record, key)))) for key in _KEYS]
        known = [time_us for time_us in own if time_us is not None]
        if known and (own[0] is not None or columns_of(record)["time_us"] <= max(known)):
            return True
    return False


def _kept(value: str) -> str:
    """The stored form of a key: its digest if it is long, because callers choose the length, or has a NUL."""
    return value if len(value) <= _MAX_KEPT and "\0" not in value else hashlib.sha256(value.encode()).hexdigest()
