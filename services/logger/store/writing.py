"""Writes to the tables of tables.py; each function runs within the transaction of its connection.

Thousands of rows arrive each second: the driver gets them as tuples, many in one statement, and any number of keys is
one parameter, a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import sqlalchemy as sql

from millrace.payload.outbox.merge import was_refused
from millrace_protos.millrace_pb2 import AppendRequest, GatewayCall, PayloadRecord
from services.logger.store.deletions import Deletions
from services.logger.store.filters import columns_of
from services.logger.store.removing import take_no_more_of_calls
from services.logger.store.tables import EACH, NOT_OF_CALL, OF_CALL, OF_CALL_FOR_NOW, column
from services.logger.store.usage import UsageSums

_COLUMNS = (*columns_of(PayloadRecord()), "of_call", "refused", "body")
_RECORDS = f"records ({', '.join(_COLUMNS)})"
_SIZES = (256, 64, 16, 4, 1)

_Row = tuple[Any, ...]


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
    connection.exec_driver_sql("INSERT OR IGNORE INTO sources (source) VALUES (?)", (source,))
    (source_id,) = column(connection, "SELECT source_id FROM sources WHERE source = ?", source)
    known = f"SELECT sequence FROM appended WHERE source_id = ? AND sequence IN {EACH}"  # noqa: S608
    for sequence in column(connection, known, source_id, json.dumps(list(by_sequence))):
        del by_sequence[sequence]
    _insert(
        connection,
        "appended (source_id, sequence, time_us)",
        [(source_id, sequence, now_us) for sequence in by_sequence],
    )

    by_id: dict[str, AppendRequest] = {}
    for request in by_sequence.values():
        by_id.setdefault(request.record.record_id, request)
    known = f"SELECT record_id FROM records WHERE record_id IN {EACH}"  # noqa: S608
    for record_id in column(connection, known, json.dumps(list(by_id))):
        del by_id[record_id]
    return list(by_id.values())


def _append_new(
    connection: sql.Connection, requests: Sequence[AppendRequest], deletions: Deletions
) -> list[AppendRequest]:
    """Adds the records that no deletion covers; returns their requests."""
    deleted = [request.record for request in requests if deletions.cover(request.record)]
    covered = {record.record_id for record in deleted}
    new = [request for request in requests if request.record.record_id not in covered]
    _replace_calls(connection, [request.record for request in requests])
    _take_no_more_of(connection, deleted)
    _insert(connection, _RECORDS, [_row(request.record, NOT_OF_CALL) for request in new])
    return new


def _replace_calls(connection: sql.Connection, new: Iterable[PayloadRecord]) -> None:
    """Removes the records of calls whose service's record has arrived."""
    call_ids = {record.call_id for record in new if record.call_id}
    if call_ids:
        connection.exec_driver_sql(
            f"DELETE FROM records WHERE of_call AND call_id IN {EACH}",  # noqa: S608
            (json.dumps(list(call_ids)),),
        )


def _take_no_more_of(connection: sql.Connection, deleted: Iterable[PayloadRecord]) -> None:
    """Marks the calls of deleted records as deleted, except those that other records name."""
    call_ids = {record.call_id for record in deleted if record.call_id}
    if call_ids:
        named = f"SELECT call_id FROM records WHERE call_id IN {EACH}"  # noqa: S608
        take_no_more_of_calls(connection, call_ids - set(column(connection, named, json.dumps(list(call_ids)))))


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
    call_ids = json.dumps(list(by_id))
    for call_id in column(connection, f"SELECT call_id FROM calls WHERE call_id IN {EACH}", call_ids):  # noqa: S608
        del by_id[call_id]
    _insert(
        connection,
        "calls (call_id, time_us, gateway)",
        [(call_id, now_us, line.gateway.SerializeToString()) for call_id, line in by_id.items()],
    )
    named = set(column(connection, f"SELECT call_id FROM records WHERE call_id IN {EACH}", call_ids))  # noqa: S608
    rows, final = [], []
    for line in lines:
        if not line.call_id or (by_id.get(line.call_id) is line and line.call_id not in named):
            record = line.record()
            is_final = not line.may_be_recorded(record)
            rows.append(_row(record, OF_CALL if is_final else OF_CALL_FOR_NOW))
            if is_final:
                final.append(record)
    _insert(connection, _RECORDS, rows)
    return final


def _insert(connection: sql.Connection, into: str, rows: list[_Row]) -> None:
    """Inserts rows; `into` is a table with its columns.

    One statement takes many rows: the driver reacquires the interpreter's lock after each statement, which can take
    long while the event loop is busy. Only a few sizes occur, so that the statements stay prepared.
    """
    begin = 0
    for size in _SIZES:
        while len(rows) - begin >= size:
            some = rows[begin : begin + size]
            begin += size
            row = f"({', '.join('?' * len(some[0]))})"
            values = ", ".join([row] * size)
            statement = f"INSERT INTO {into} VALUES {values}"  # noqa: S608  # only names and question marks
            connection.exec_driver_sql(statement, tuple(chain.from_iterable(some)))


def _row(record: PayloadRecord, of_call: int) -> _Row:
    return (*columns_of(record).values(), of_call, int(was_refused(record)), record.SerializeToString())
