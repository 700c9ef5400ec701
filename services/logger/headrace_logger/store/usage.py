"""The sums of usage by client, hour of UTC and model.

They are separate from the records, so that neither retention nor a deletion changes a client's usage. `UsageSums.add`
runs in the transaction that marks a record's (source, sequence) as arrived, so each record is counted exactly once,
even if it is sent repeatedly. Lines of only the gateway are not counted: they have no tokens, and the service's record
of the same call may follow.

A request that was refused may name any model. So a failure is counted under its model only if that model has answered
before, otherwise under "": callers cannot add an unlimited number of rows.

`select` reads one range of the primary key for each client.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sql
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.exc import OperationalError

from headrace.errors import DeadlineError, InvalidRequestError
from headrace_logger.store.tables import among, is_postgresql, upsert, usage
from headrace_protos.headrace_pb2 import PayloadRecord, UsageGroup, UsageRequest, UsageResponse

HOUR_S = 3600
HOUR_US = HOUR_S * 1_000_000
MAX_GROUPS = 10_000
_FIRST_HOUR, _LAST_HOUR = -17_259_888, 70_389_527  # The first and last of a protobuf Timestamp: years 1 to 9999.
DEFAULT_GROUP = "client,model"
_FORGOTTEN_AT_ONCE = 10_000
_STEPS = 20_000  # Instructions of SQLite between two looks at the clock: about a millisecond.
_MAX_DURATION_US = 10**15
_NOT_FAILED = frozenset({"OK", "CANCELLED"})

_SUMS = tuple(column.name for column in usage.columns if not column.primary_key)
_DAY = usage.c.hour // sql.literal_column("24", sql.Integer)
_COLUMNS: Mapping[str, sql.ColumnElement[Any]] = {"client": usage.c.client, "model": usage.c.model, "day": _DAY}


def _of_every_client() -> sql.ColumnElement[bool]:
    """True, in a form that reads a range of the key for each client; each client is found by one look into the key."""
    # Nested: SQLite's driver recognizes a deletion by its first word.
    first = sql.select(sql.func.min(usage.c.client).label("client")).cte("clients", recursive=True, nesting=True)
    following = sql.select(sql.func.min(usage.c.client)).where(usage.c.client > first.c.client)
    clients = first.union_all(sql.select(following.scalar_subquery()).where(first.c.client.is_not(None)))
    return usage.c.client.in_(sql.select(clients.c.client))


_OF_EVERY_CLIENT = _of_every_client()


class _Key(NamedTuple):
    client: str
    hour: int
    model: str


class UsageSums:
    """Adds records to the table; belongs to the writer's thread."""

    def __init__(self) -> None:
        self._models: set[str] = set()  # Those that have answered.

    def load(self, connection: sql.Connection) -> None:
        self._models = set(connection.scalars(sql.select(usage.c.model).distinct()))

    def add(self, connection: sql.Connection, records: Sequence[PayloadRecord]) -> None:
        """Adds records that have not been added before."""
        # Unknown models may have answered at other loggers; only this one writes to an SQLite file.
        if is_postgresql(connection) and (unknown := {record.model for record in records} - self._models):
            self._models.update(among(connection, usage.c.model, unknown))
        sums: dict[_Key, list[int]] = {}
        for record in records:
            total = sums.setdefault(self._key(record), [0] * len(_SUMS))
            for index, value in enumerate(_taken(record)):
                total[index] += value
        rows = [key._asdict() | dict(zip(_SUMS, values, strict=True)) for key, values in sums.items()]
        upsert(connection, usage, rows, added=_SUMS)

    def _key(self, record: PayloadRecord) -> _Key:
        model = record.model
        if model not in self._models:
            if record.status == "OK" or record.HasField("ttft_ms"):
                self._models.add(model)
            else:
                model = ""
        return _Key(record.client, record.time.seconds // HOUR_S, model)


def _taken(record: PayloadRecord) -> tuple[int, ...]:
    """The usage of a request, in the order of the columns."""
    taken = record.usage
    duration_us = _microseconds(record.duration_ms)
    return (
        1,
        int(record.status not in _NOT_FAILED),
        taken.prompt_tokens,
        taken.cached_tokens,
        taken.completion_tokens,
        duration_us,
        _microseconds(record.engine_ms) if record.HasField("engine_ms") else duration_us,
    )


def _microseconds(ms: float) -> int:
    return int(min(max(0.0, 1000 * ms), _MAX_DURATION_US)) if math.isfinite(ms) else 0


def groups_of(request: UsageRequest) -> tuple[str, ...]:
    """The columns of a request's groups; raises InvalidRequestError for some that are unknown or repeated."""
    text = request.group if request.HasField("group") else DEFAULT_GROUP
    group = tuple(filter(None, map(str.strip, text.split(","))))
    if len(set(group)) < len(group) or not set(group) <= set(_COLUMNS):
        raise InvalidRequestError(f"group {text!r} is not a comma list of {', '.join(_COLUMNS)}", param="group")
    return group


def _hours_of(request: UsageRequest) -> dict[str, int]:
    """The bounds of a request, in whole hours since 1970."""
    hours = {}
    if request.HasField("since"):
        hours["since"] = _hour(request.since.seconds)
    if request.HasField("until"):
        hours["until"] = _hour(request.until.seconds + (request.until.nanos > 0) + HOUR_S - 1)
    return hours


def statement(request: UsageRequest) -> sql.Select[Any]:
    """The groups of a request in order, one more than may be."""
    columns = [_COLUMNS[name].label(name) for name in groups_of(request)]
    sums = [sql.cast(sql.func.coalesce(sql.func.sum(usage.c[name]), 0), sql.BigInteger).label(name) for name in _SUMS]
    clauses = [usage.c.client == request.client if request.HasField("client") else _OF_EVERY_CLIENT]
    hours = _hours_of(request)
    if "since" in hours:
        clauses.append(usage.c.hour >= hours["since"])
    if "until" in hours:
        clauses.append(usage.c.hour < hours["until"])
    if request.HasField("model"):
        clauses.append(usage.c.model == request.model)
    return sql.select(*columns, *sums).where(*clauses).group_by(*columns).order_by(*columns).limit(MAX_GROUPS + 1)


def select(connection: sql.Connection, request: UsageRequest, limit_s: float) -> UsageResponse:
    """The usage of a request; raises InvalidRequestError above MAX_GROUPS, DeadlineError if it takes too long."""
    with _limited(connection, limit_s):
        rows = connection.execute(statement(request)).all()
    if len(rows) > MAX_GROUPS:
        raise InvalidRequestError(f"more than {MAX_GROUPS} groups: choose a shorter period or fewer groups")
    bounds: Mapping[str, Any] = {name: Timestamp(seconds=hour * HOUR_S) for name, hour in _hours_of(request).items()}
    return UsageResponse(groups=[_group(groups_of(request), row) for row in rows], **bounds)


def forget_some(connection: sql.Connection, before_us: int) -> int:
    """Deletes some of the sums of hours that ended before a time; returns their number."""
    key = sql.tuple_(usage.c.client, usage.c.hour, usage.c.model)
    old = sql.select(*usage.primary_key).where(_OF_EVERY_CLIENT, usage.c.hour < before_us // HOUR_US)
    return connection.execute(sql.delete(usage).where(key.in_(old.limit(_FORGOTTEN_AT_ONCE)))).rowcount


def _group(names: Sequence[str], row: sql.Row[Any]) -> UsageGroup:
    values = dict(zip(names, row, strict=False))
    if "day" in values:
        values["day"] = _date(values["day"])
    sums = {name: getattr(row, name) for name in _SUMS if not name.endswith("_us")}
    seconds = {"seconds": row.engine_us / 1_000_000, "duration_seconds": row.duration_us / 1_000_000}
    return UsageGroup(**values, **sums, **seconds)


def _date(day: int) -> str:
    """The date of a day since 1970; of a clock that is far off, its number."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return str(day)


def _hour(seconds: int) -> int:
    """The hour of a time, clamped to what a Timestamp can have."""
    return max(_FIRST_HOUR, min(seconds // HOUR_S, _LAST_HOUR))


@contextmanager
def _limited(connection: sql.Connection, limit_s: float) -> Iterator[None]:
    """Interrupts statements of the block after a time: DeadlineError."""
    give_up_at = time.monotonic() + limit_s
    driver: Any = connection.connection.driver_connection
    if is_postgresql(connection):
        # Until the end of the transaction; 0 would be no limit.
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {max(1, round(1000 * limit_s))}")
    else:
        driver.set_progress_handler(lambda: time.monotonic() >= give_up_at, _STEPS)
    try:
        yield
    except OperationalError:
        if time.monotonic() < give_up_at:
            raise
        raise DeadlineError(f"the usage was not summed within {limit_s:g} s: choose a shorter period") from None
    finally:
        if not is_postgresql(connection):
            driver.set_progress_handler(None, 0)
