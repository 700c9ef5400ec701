"""Adds what has arrived: the services' records, and the calls that the gateway logged.

Each function runs within the transaction of its connection. Thousands of rows arrive each second, so a statement takes
many.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import sqlalchemy as sql

from headrace.payload.records import was_refused
from headrace_logger.store import deletions, shares
from headrace_logger.store.filters import columns_of
from headrace_logger.store.tables import (
    NOT_OF_CALL,
    OF_CALL,
    OF_CALL_FOR_NOW,
    among,
    appended,
    calls,
    lists,
    records,
    sources,
)
from headrace_logger.store.usage import UsageSums
from headrace_protos.headrace_pb2 import AppendRequest, GatewayCall, PayloadRecord


def append(
    connection: sql.Connection,
    requests: Sequence[AppendRequest],
    now_us: int,
    usage: UsageSums,
) -> list[AppendRequest]:
    """Adds the services' records that are new and not covered by a deletion; returns their requests.

    The sums of usage include those that a deletion covers.
    """
    new: list[AppendRequest] = []
    for source in dict.fromkeys(request.source for request in requests):
        arrived = _new_of_source(connection, source, [one for one in requests if one.source == source], now_us)
        usage.add(connection, [request.record for request in arrived])
        new += _append_new(connection, arrived)
    return new


def _new_of_source(
    connection: sql.Connection, source: str, requests: Iterable[AppendRequest], now_us: int
) -> list[AppendRequest]:
    """The requests of a source that have not arrived before, with records that are not there; marks them as arrived."""
    by_sequence: dict[int, AppendRequest] = {}
    for request in requests:
        by_sequence.setdefault(request.sequence, request)
    source_id = _id_of(connection, source)
    for sequence in among(connection, appended.c.sequence, by_sequence, appended.c.source_id == source_id):
        del by_sequence[sequence]
    if by_sequence:
        arrived = [{"source_id": source_id, "sequence": sequence, "time_us": now_us} for sequence in by_sequence]
        connection.execute(sql.insert(appended), arrived)

    by_id: dict[str, AppendRequest] = {}
    for request in by_sequence.values():
        by_id.setdefault(request.record.record_id, request)
    for record_id in among(connection, records.c.record_id, by_id):
        del by_id[record_id]
    return list(by_id.values())


def _id_of(connection: sql.Connection, source: str) -> int:
    """The number of a source, which a new one gets here."""
    known = sql.select(sources.c.source_id).where(sources.c.source == source)
    if (source_id := connection.scalar(known)) is None:
        connection.execute(sql.insert(sources), {"source": source})
        source_id = connection.execute(known).scalar_one()
    return int(source_id)


def _append_new(connection: sql.Connection, requests: Sequence[AppendRequest]) -> list[AppendRequest]:
    """Adds the records that no deletion covers; returns their requests."""
    new = deletions.uncovered(connection, requests)
    call_ids = {request.record.call_id for request in requests if request.record.call_id}
    # The service's record replaces that of only the gateway's line.
    for some in lists(call_ids):
        shares.remove(connection, (records.c.of_call != NOT_OF_CALL) & records.c.call_id.in_(some))
    added = {id(request) for request in new}
    deleted = {request.record.call_id for request in requests if id(request) not in added and request.record.call_id}
    shares.take_no_more_of_calls(connection, shares.unnamed_calls(connection, deleted))
    shares.add(connection, [_row(request.record, NOT_OF_CALL) for request in new])
    return new


class GatewayLine(Protocol):
    """A call that the gateway logged; `call_id` is empty where it has none. `record` makes the call's own record."""

    @property
    def call_id(self) -> str: ...

    @property
    def gateway(self) -> GatewayCall: ...

    def record(self) -> PayloadRecord: ...

    def may_be_recorded(self, record: PayloadRecord) -> bool:
        """Whether a service may record the call of this record."""
        ...


def add_calls(connection: sql.Connection, lines: Sequence[GatewayLine], now_us: int) -> None:
    """Adds the calls that are new."""
    by_id = {line.call_id: line for line in reversed(lines) if line.call_id}
    unnamed = shares.unnamed_calls(connection, by_id.keys())
    for call_id in among(connection, calls.c.call_id, by_id):
        del by_id[call_id]
    if by_id:
        new = [
            {"call_id": call_id, "time_us": now_us, "gateway": line.gateway.SerializeToString()}
            for call_id, line in by_id.items()
        ]
        connection.execute(sql.insert(calls), new)
    rows = []
    for line in lines:
        if not line.call_id or (by_id.get(line.call_id) is line and line.call_id in unnamed):
            record = line.record()
            rows.append(_row(record, OF_CALL_FOR_NOW if line.may_be_recorded(record) else OF_CALL))
    shares.add(connection, rows)


def _row(record: PayloadRecord, of_call: int) -> dict[str, Any]:
    columns = columns_of(record)
    return columns | {"of_call": of_call, "refused": was_refused(record), "body": record.SerializeToString()}
