"""Finds records: statements on the tables of tables.py, and page tokens.

Newest first means by the records' times, then by the order of commit. If few records pass a filter, they are looked up
in its index and sorted; if many records pass every filter, the newest are scanned for those that pass all, so a page is
found quickly. SQLite cannot know which of the two applies, so `page` counts matches, up to a bound.

A page is first found without the bodies of its records, which may be large; the bodies are then read in batches, so
that records without a reader take no memory. Records stay serialized: a `Found` is the record for a reader, assembled
from parts that protobuf merges; only a text search parses them.

Pure except for the connection that the functions take.
"""

import base64
import struct
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sql

from headrace.errors import DeadlineError, InvalidRequestError
from headrace_logger.store.filters import Filters
from headrace_logger.store.shares import SIZE
from headrace_logger.store.tables import NOT_OF_CALL, OF_CALL_FOR_NOW, calls, is_postgresql, now_us, records
from headrace_protos.headrace_pb2 import PayloadRecord

# This many rows are looked up and sorted in a few milliseconds.
FEW = 2000
# The gateway's line of a call may arrive before the service's record, which may wait in a spool.
RECORD_LATE_S = 10.0
_BYTES_PER_READ = 16 * 1024 * 1024  # Of records in the order of commit.

# The first byte distinguishes it from the tokens of earlier versions. A record's own id, and not its position: the gaps
# between positions would reveal to a client how many records other clients have.
_TOKEN, _TOKEN_VERSION = struct.Struct(">Bq16s"), 3

Row = sql.Row[Any]


class Place(NamedTuple):
    """A record's place in the order of queries."""

    time_us: int
    position: int


class Stored(NamedTuple):
    """A record and its place in the order of commit."""

    position: int
    record: PayloadRecord


class Found(NamedTuple):
    """A record for its readers, in parts that protobuf merges; `gateway` is the gateway's part."""

    body: bytes
    gateway: bytes | None
    page_token: str = ""

    @property
    def serialized(self) -> bytes:
        added = PayloadRecord(page_token=self.page_token)
        if self.gateway is not None:
            added.gateway.ParseFromString(self.gateway)
        return self.body + added.SerializeToString()

    @property
    def record(self) -> PayloadRecord:
        return PayloadRecord.FromString(self.serialized)


def page(
    connection: sql.Connection, filters: Filters, before: Place | None, limit: int, room: int
) -> tuple[Sequence[Row], Sequence[Found | None]]:
    """Finds the newest rows before a place that pass every filter except the text, and reads the first of them.

    It reads as many as fit into `room` bytes, with the results of `read`.
    """
    rows = connection.execute(page_statement(filters, before, limit, _few(connection, filters))).all()
    return rows, read(connection, filters, rows[: fitting(rows, room)])


def read(connection: sql.Connection, filters: Filters, rows: Sequence[Row]) -> Sequence[Found | None]:
    """Reads the rows of a page; None for a row whose text does not match, or that must not be shown yet."""
    shown = [row.position for row in rows if not may_be_replaced(row)]
    if not shown:
        return [None] * len(rows)
    chosen = whole_rows().where(records.c.position.in_(shown))
    # Without an order, which would make SQLite hold all of them.
    wholes = {row.position: row for row in connection.execute(chosen) if _has_text(filters, row.body)}
    return [
        Found(whole.body, whole.gateway, token_of(row)) if (whole := wholes.get(row.position)) else None for row in rows
    ]


def fitting(rows: Sequence[Row], room: int) -> int:
    """How many of the first rows have at most `room` bytes together."""
    for count, row in enumerate(rows):
        room -= row.size
        if room < 0:
            return count
    return len(rows)


def one(connection: sql.Connection, position: int) -> Found | None:
    row = connection.execute(whole_rows().where(records.c.position == position)).one_or_none()
    return Found(row.body, row.gateway) if row else None


def page_statement(
    filters: Filters, before: Place | None, limit: int, few: sql.Select[Any] | None = None
) -> sql.Select[Any]:
    """The statement of `page`; `few` finds the positions of all candidates, if they are few."""
    clauses = filters.clauses(records)
    if few is not None:
        clauses.append(records.c.position.in_(few))
    if before is not None:
        # The first of the two is for the index.
        clauses.append(records.c.time_us <= before.time_us)
        clauses.append((records.c.time_us < before.time_us) | (records.c.position < before.position))
    # The other columns are read only for the chosen rows.
    chosen = sql.select(records.c.position).where(*clauses).order_by(*_newest_first()).limit(limit)
    columns = (records.c.position, records.c.record_id, records.c.time_us, records.c.of_call, SIZE)
    rows = sql.select(*columns, calls.c.time_us.label("called_us")).select_from(_with_calls())
    return rows.where(records.c.position.in_(chosen)).order_by(*_newest_first())


def by_record_id(record_id: str, client: str | None) -> sql.Select[Any]:
    """The position and size of the record with this id, if it is the client's; None: anyone's."""
    chosen = sql.select(records.c.position, SIZE).where(records.c.record_id == record_id)
    return chosen if client is None else chosen.where(records.c.client == client)


def committed(connection: sql.Connection, filters: Filters, position: int, limit: int) -> tuple[Sequence[Row], int]:
    """Examines at most `limit` records after a position, in the order of commit, those of calls for good among them.

    Returns the rows that pass every filter except the text, and the last position that was examined.
    """
    columns = (records.c.position, SIZE, *(records.c[name] for name in filters.columns))
    shown = sql.select(*columns).where(records.c.position > position, records.c.of_call != OF_CALL_FOR_NOW)
    rows = connection.execute(shown.order_by(records.c.position).limit(limit)).all()
    return [row for row in rows if filters.pass_columns(row)], rows[-1].position if rows else position


def bodies(connection: sql.Connection, filters: Filters, rows: Sequence[Row]) -> list[bytes]:
    """The bodies of rows, in the order of commit, of those that contain the text."""
    chosen = sql.select(records.c.body).where(records.c.position.in_([row.position for row in rows]))
    found = connection.execute(chosen.order_by(records.c.position))
    return [row.body for row in found if _has_text(filters, row.body)]


def after(connection: sql.Connection, position: int, limit: int) -> list[Stored]:
    """The services' records after a position, in the order of commit; fewer than the limit where they are large."""
    clauses = (records.c.position > position, records.c.of_call == NOT_OF_CALL)
    chosen = sql.select(records.c.position, records.c.body).where(*clauses).order_by(records.c.position).limit(limit)
    page: list[Stored] = []
    size = 0
    for row in connection.execute(chosen):
        page.append(Stored(row.position, PayloadRecord.FromString(row.body)))
        size += len(row.body)
        if size >= _BYTES_PER_READ:
            break
    return page


def last_position(connection: sql.Connection) -> int:
    """The highest position ever used; 0 if there was no record."""
    if is_postgresql(connection):
        sequence = sql.table("records_position_seq", sql.column("last_value"), sql.column("is_called"))
        return int(
            connection.execute(sql.select(sequence.c.last_value * sequence.c.is_called.cast(sql.Integer))).scalar_one()
        )
    numbered = sql.table("sqlite_sequence", sql.column("name"), sql.column("seq"))
    return connection.scalar(sql.select(numbered.c.seq).where(numbered.c.name == records.name)) or 0


def newest_position(connection: sql.Connection) -> int:
    """The highest position of a record; 0 if there is none."""
    return connection.execute(sql.select(sql.func.max(records.c.position))).scalar_one() or 0


def may_be_replaced(row: Row) -> bool:
    """Whether this is a call's record that a service's record may still replace: it must not be shown yet."""
    if row.of_call != OF_CALL_FOR_NOW or row.called_us is None:
        return False
    return bool(now_us() - row.called_us < RECORD_LATE_S * 1_000_000)


def token_of(row: Row) -> str:
    """The page token that continues after a row."""
    packed = _TOKEN.pack(_TOKEN_VERSION, row.time_us, uuid.UUID(row.record_id).bytes)
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def place_of(connection: sql.Connection, page_token: str) -> Place:
    """The place where a page token continues; if its record was deleted, among the records of earlier microseconds."""
    try:
        version, time_us, record_id = _TOKEN.unpack(base64.urlsafe_b64decode(page_token + "=="))
    except (ValueError, struct.error):
        version = None
    if version != _TOKEN_VERSION:
        raise InvalidRequestError("page_token is invalid")
    found = connection.execute(by_record_id(str(uuid.UUID(bytes=record_id)), None)).one_or_none()
    return Place(time_us, found.position if found else 0)


def whole_rows() -> sql.Select[Any]:
    """Rows of all records: the parts of `Found`, and what `may_be_replaced` looks at."""
    # A record of only the gateway's line contains that part itself: a duplicate field would be invalid for the
    # transcoder.
    gateway = sql.case((records.c.of_call == NOT_OF_CALL, calls.c.gateway)).label("gateway")
    columns = (records.c.position, records.c.time_us, records.c.of_call, records.c.body, gateway)
    return sql.select(*columns, calls.c.time_us.label("called_us")).select_from(_with_calls())


def _with_calls() -> sql.FromClause:
    return records.outerjoin(calls, calls.c.call_id == records.c.call_id)


def _has_text(filters: Filters, body: bytes) -> bool:
    """Whether a record contains the text; protobuf stores strings unchanged, so most records need no parsing."""
    text = filters.text
    return not text or (text.encode() in body and filters.has_text(PayloadRecord.FromString(body)))


def lookups(filters: Filters) -> list[sql.Select[Any]]:
    """Statements that find, for each single filter, the positions that pass it, up to FEW + 1."""
    return [sql.select(records.c.position).where(clause).limit(FEW + 1) for clause in filters.lookups(records)]


def _few(connection: sql.Connection, filters: Filters) -> sql.Select[Any] | None:
    """The statement that finds the positions that pass one of the filters, if there is one that at most FEW pass."""
    for statement in lookups(filters):
        if connection.execute(sql.select(sql.func.count()).select_from(statement.subquery())).scalar_one() <= FEW:
            return statement
    return None


def _newest_first() -> tuple[sql.ColumnElement[Any], ...]:
    return records.c.time_us.desc(), records.c.position.desc()


def searched_too_long(looked_through: int, last: Row) -> DeadlineError:
    """The error of a text search that has reached the row `last`."""
    return DeadlineError(
        f"the text search took too long; the newest {looked_through} records were searched:"
        f" add filters, or continue with page_token={token_of(last)}"
    )
