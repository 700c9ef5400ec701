"""Writes to the tables of tables.py; each function runs within the transaction of its connection.

Thousands of rows arrive each second, so statements take many rows, and any number of keys: see statements.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import sqlalchemy as sql

from headrace.payload.outbox.merge import was_refused
from headrace_logger.store.deletions import Deletions
from headrace_logger.store.filters import columns_of
from headrace_logger.store.removing import named_by_records, take_no_more_of_calls
from headrace_logger.store.statements import IN_EACH, Row, column, each, insert, run
from headrace_logger.store.tables import NOT_OF_CALL, OF_CALL, OF_CALL_FOR_NOW, appended, calls, records
from headrace_logger.store.usage import UsageSums
from headrace_protos.headrace_pb2 import AppendRequest, GatewayCall, PayloadRecord

_COLUMNS = (*columns_of(PayloadRecord()), "of_call", "refused", "body")


def append(
    connection: sql.Connection,
    requests: Sequence[AppendRequest],
    now_us: int,
    deletions: Deletions,
    usage: UsageSums,
) -> list[AppendRequest]:
    """Adds the services' records that are new and not covered by a deletion; returns their requests.

    The sums of usage include those that a deletion covers.
    """
    deletions.refresh(connection)
    new: list[AppendRequest] = []
    for source in dict.fromkeys(request.source for request in requests):
        arrived = _new_of_source(connection, source, [one for one in requests if one.source == source], now_us)
        usage.add(connection, [request.record for request in arrived])
        new += _append_new(connection, arrived, deletions)
    return new


def _new_of_source(
    connection: sql.Connection, source: str, requests: Iterable[AppendRequest], now_us: int
) -> list[AppendRequest]:
    """The requests of a source that have not arrived before, with records that are not there; marks them as arrived."""
    by_sequence: dict[int, AppendRequest] = {}
    for request in requests:
        by_sequence.setdefault(request.sequence, request)
    source_id = _id_of(connection, source)
    known = f"SELECT sequence FROM appended WHERE source_id = ? AND sequence {IN_EACH}"  # noqa: S608
    for sequence in column(connection, known, source_id, each(connection, by_sequence)):
        del by_sequence[sequence]
    arrived = [(source_id, sequence, now_us) for sequence in by_sequence]
    insert(connection, appended, ("source_id", "sequence", "time_us"), arrived)

    by_id: dict[str, AppendRequest] = {}
    for request in by_sequence.values():
        by_id.setdefault(request.record.record_id, request)
    known = f"SELECT record_id FROM records WHERE record_id {IN_EACH}"  # noqa: S608
    for record_id in column(connection, known, each(connection, by_id)):
        del by_id[record_id]
    return list(by_id.values())


def _id_of(connection: sql.Connection, source: str) -> int:
    """The number of a source, which a new one gets here."""
    known = "SELECT source_id FROM sources WHERE source = ?"
    if not (found := column(connection, known, source)):
        run(connection, "INSERT INTO sources (source) VALUES (?)", source)
        found = column(connection, known, source)
    return int(found[0])


def _append_new(
    connection: sql.Connection, requests: Sequence[AppendRequest], deletions: Deletions
) -> list[AppendRequest]:
    """Adds the records that no deletion covers; returns their requests."""
    deleted = [request.record for request in requests if deletions.cover(request.record)]
    covered = {record.record_id for record in deleted}
    new = [request for request in requests if request.record.record_id not in covered]
    _replace_calls(connection, [request.record for request in requests])
    _take_no_more_of(connection, deleted)
    insert(connection, records, _COLUMNS, [_row(request.record, NOT_OF_CALL) for request in new])
    return new


def _replace_calls(connection: sql.Connection, new: Iterable[PayloadRecord]) -> None:
    """Removes the records of calls whose service's record has arrived."""
    call_ids = {record.call_id for record in new if record.call_id}
    if call_ids:
        statement = f"DELETE FROM records WHERE of_call <> {NOT_OF_CALL} AND call_id {IN_EACH}"  # noqa: S608
        run(connection, statement, each(connection, call_ids))


def _take_no_more_of(connection: sql.Connection, deleted: Iterable[PayloadRecord]) -> None:
    """Marks the calls of deleted records as deleted, except those that other records name."""
    call_ids = {record.call_id for record in deleted if record.call_id}
    if call_ids:
        take_no_more_of_calls(connection, call_ids - named_by_records(connection, call_ids))


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


def add_calls(connection: sql.Connection, lines: Sequence[GatewayLine], now_us: int) -> list[PayloadRecord]:
    """Adds the calls that are new; returns the records of those that no service can record."""
    by_id = {line.call_id: line for line in reversed(lines) if line.call_id}
    call_ids = list(by_id)
    known = f"SELECT call_id FROM calls WHERE call_id {IN_EACH}"  # noqa: S608
    for call_id in column(connection, known, each(connection, call_ids)):
        del by_id[call_id]
    new = [(call_id, now_us, line.gateway.SerializeToString()) for call_id, line in by_id.items()]
    insert(connection, calls, ("call_id", "time_us", "gateway"), new)
    named = named_by_records(connection, call_ids)
    rows, final = [], []
    for line in lines:
        if not line.call_id or (by_id.get(line.call_id) is line and line.call_id not in named):
            record = line.record()
            is_final = not line.may_be_recorded(record)
            rows.append(_row(record, OF_CALL if is_final else OF_CALL_FOR_NOW))
            if is_final:
                final.append(record)
    insert(connection, records, _COLUMNS, rows)
    return final


def _row(record: PayloadRecord, of_call: int) -> Row:
    return (*columns_of(record).values(), of_call, int(was_refused(record)), record.SerializeToString())
