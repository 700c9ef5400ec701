"""How records are found: statements on the tables of schema.py, and the tokens of pages.

Newest first means by the records' times, and at the same time by the order of commit. A filter that few records pass
is looked up in its index, and what it finds is sorted; where many pass each, the newest are scanned for those that pass
all, so that a page is never far. Which of the two, SQLite cannot know: `page` counts, up to a bound.

Pure but for the connection that they are given.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sql

from millrace.errors import DeadlineError, InvalidRequestError
from millrace.protos.millrace_pb2 import PayloadRecord
from services.logger.filters import Filters
from services.logger.schema import NOT_OF_CALL, OF_CALL_FOR_NOW, calls, now_us, records

# So many rows are looked up and sorted in a few milliseconds.
FEW = 2000
# The gateway's word on a call may come before the service's record, which waits where the logger was away.
RECORD_LATE_S = 10.0

# The first byte tells it from the tokens of earlier versions.
_TOKEN, _TOKEN_VERSION = struct.Struct(">Bqq"), 2

Row = sql.Row[Any]


class Place(NamedTuple):
    """Where a record lies in the order of queries."""

    time_us: int
    position: int


def page(connection: sql.Connection, filters: Filters, before: Place | None, limit: int) -> Sequence[Row]:
    """The newest rows before a place that pass every filter but that by text."""
    return connection.execute(page_statement(filters, before, limit, _few(connection, filters))).all()


def page_statement(
    filters: Filters, before: Place | None, limit: int, positions: Sequence[int] | None = None
) -> sql.Select[Any]:
    """What `page` executes; `positions` are all that can pass, where they are few."""
    clauses = filters.clauses(records)
    if positions is not None:
        clauses.append(records.c.position.in_(each_of(positions)))
    if before is not None:
        # The first of the two is what an index is entered by.
        clauses.append(records.c.time_us <= before.time_us)
        clauses.append((records.c.time_us < before.time_us) | (records.c.position < before.position))
    # The bodies are read of those alone that have been chosen.
    chosen = sql.select(records.c.position).where(*clauses).order_by(*_newest_first()).limit(limit)
    return whole_rows().where(records.c.position.in_(chosen)).order_by(*_newest_first())


def by_record_id(record_id: str) -> sql.Select[Any]:
    """The row of that key."""
    return whole_rows().where(records.c.record_id == record_id)


def after(position: int, limit: int) -> sql.Select[Any]:
    """Positions and bodies of the services' records in the order of commit."""
    clauses = (records.c.position > position, records.c.of_call == NOT_OF_CALL)
    return sql.select(records.c.position, records.c.body).where(*clauses).order_by(records.c.position).limit(limit)


def record_of(row: Row) -> PayloadRecord:
    """The record as its readers see it: with what the gateway said of the call."""
    record = PayloadRecord.FromString(row.body)
    if row.gateway is not None:
        record.gateway.ParseFromString(row.gateway)
    return record


def may_be_replaced(row: Row) -> bool:
    """Whether this is a call's record in place of which a service's own may yet come: not for the reader's eyes."""
    if row.of_call != OF_CALL_FOR_NOW or row.called_us is None:
        return False
    return bool(now_us() - row.called_us < RECORD_LATE_S * 1_000_000)


def token_of(row: Row) -> str:
    """The page token that goes on after a row."""
    return base64.urlsafe_b64encode(_TOKEN.pack(_TOKEN_VERSION, row.time_us, row.position)).rstrip(b"=").decode()


def place_of(page_token: str) -> Place:
    """Where a page token goes on."""
    try:
        version, *place = _TOKEN.unpack(base64.urlsafe_b64decode(page_token + "=="))
    except (ValueError, struct.error):
        version = None
    if version != _TOKEN_VERSION:
        raise InvalidRequestError("page_token is not one of ours")
    return Place(*place)


def whole_rows() -> sql.Select[Any]:
    """Rows as `record_of` takes them, of all records."""
    joined = records.outerjoin(calls, calls.c.call_id == records.c.call_id)
    columns = (records.c.position, records.c.time_us, records.c.of_call, records.c.body)
    return sql.select(*columns, calls.c.gateway, calls.c.time_us.label("called_us")).select_from(joined)


def each_of(values: Sequence[int | str]) -> sql.ScalarSelect[Any]:
    """Any number of values as one parameter, of which SQLite takes a bounded number."""
    return sql.select(sql.func.json_each(json.dumps(values)).table_valued("value").c.value).scalar_subquery()


def lookups(filters: Filters) -> list[sql.Select[Any]]:
    """Statements that find, for each filter alone, the positions that pass it, up to one more than FEW."""
    return [sql.select(records.c.position).where(clause).limit(FEW + 1) for clause in filters.lookups(records)]


def _few(connection: sql.Connection, filters: Filters) -> Sequence[int] | None:
    """The positions that pass one of the filters, if one there is that no more than FEW pass."""
    for statement in lookups(filters):
        found = connection.execute(statement).scalars().all()
        if len(found) <= FEW:
            return found
    return None


def _newest_first() -> tuple[sql.ColumnElement[Any], ...]:
    return records.c.time_us.desc(), records.c.position.desc()


def searched_too_long(looked_through: int, last: Row) -> DeadlineError:
    """Of a search for text that has come to the row `last`."""
    return DeadlineError(
        f"of the newest records {looked_through} were looked through for the text, which took too long:"
        f" narrow the search by other filters, or go on with page_token={token_of(last)}"
    )
