"""The sums of usage by client, hour of UTC and model.

They are separate from the records, so that neither retention nor a deletion changes a client's usage. `UsageSums.add`
runs in the transaction that marks a record's (source, sequence) as arrived, so each record is counted exactly once,
even if it is sent repeatedly. Lines of only the gateway are not counted: they have no tokens, and the service's record
of the same call may follow.

A request that was refused may name any model. So a failure is counted under its model only if that model has answered
before, otherwise under "": callers cannot add an unlimited number of rows.

`select` reads one range of the primary key for each client, which is found by a loose scan of the key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sql
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.exc import OperationalError

from headrace.errors import DeadlineError, InvalidRequestError
from headrace_logger.store.statements import IN_EACH, column, each, is_postgresql, run, upsert
from headrace_logger.store.tables import usage
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
_COLUMNS_WRITTEN = ("client", "hour", "model", *_SUMS)
_ADD = (
    "ON CONFLICT (client, hour, model) DO UPDATE"
    f" SET {', '.join(f'{name} = usage.{name} + excluded.{name}' for name in _SUMS)}"
)
# Every client that has rows, each found by one look into the key.
_CLIENTS = (
    "WITH RECURSIVE clients (client) AS (SELECT min(client) FROM usage"
    " UNION ALL SELECT (SELECT min(client) FROM usage WHERE client > clients.client) FROM clients"
    " WHERE clients.client IS NOT NULL)"
)
_ONE_CLIENT = "WITH clients (client) AS (VALUES (:client))"
_DAY = "usage.hour / 24"
_COLUMNS = {"client": "usage.client", "model": "usage.model", "day": _DAY}
_FORGET = (
    # Begins with DELETE, by which the driver knows that it writes.
    f"DELETE FROM usage WHERE (client, hour, model) IN ({_CLIENTS} SELECT usage.client, usage.hour, usage.model"  # noqa: S608
    " FROM clients {join} usage ON usage.client = clients.client WHERE usage.hour < ? LIMIT ?)"
)


class _Key(NamedTuple):
    client: str
    hour: int
    model: str


class UsageSums:
    """Adds records to the table; belongs to the writer's thread."""

    def __init__(self) -> None:
        self._models: set[str] = set()  # Those that have answered.

    def load(self, connection: sql.Connection) -> None:
        self._models = set(column(connection, "SELECT DISTINCT model FROM usage"))

    def add(self, connection: sql.Connection, records: Sequence[PayloadRecord]) -> None:
        """Adds records that have not been added before."""
        self._refresh(connection, records)
        sums: dict[_Key, list[int]] = {}
        for record in records:
            total = sums.setdefault(self._key(record), [0] * len(_SUMS))
            for index, value in enumerate(_taken(record)):
                total[index] += value
        if sums:
            upsert(connection, usage, _COLUMNS_WRITTEN, [(*key, *values) for key, values in sums.items()], _ADD)

    def _refresh(self, connection: sql.Connection, records: Sequence[PayloadRecord]) -> None:
        """Looks up whether unknown models have answered at other loggers; only this one writes to an SQLite file."""
        if is_postgresql(connection) and (unknown := {record.model for record in records} - self._models):
            answered = f"SELECT DISTINCT model FROM usage WHERE model {IN_EACH}"  # noqa: S608
            self._models.update(column(connection, answered, each(connection, unknown)))

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


@dataclass(frozen=True)
class UsageQuery:
    """A request for usage in whole hours since 1970; None is no bound."""

    since: int | None
    until: int | None
    client: str | None
    model: str | None
    group: tuple[str, ...]

    @classmethod
    def of(cls, request: UsageRequest) -> UsageQuery:
        """Reads a request; raises InvalidRequestError for groups that are unknown or repeated."""
        text = request.group if request.HasField("group") else DEFAULT_GROUP
        group = tuple(filter(None, map(str.strip, text.split(","))))
        if len(set(group)) < len(group) or not set(group) <= set(_COLUMNS):
            raise InvalidRequestError(f"group {text!r} is not a comma list of {', '.join(_COLUMNS)}", param="group")
        return cls(
            _hour(request.since.seconds) if request.HasField("since") else None,
            _hour(request.until.seconds + (request.until.nanos > 0) + HOUR_S - 1)
            if request.HasField("until")
            else None,
            request.client if request.HasField("client") else None,
            request.model if request.HasField("model") else None,
            group,
        )

    def statement(self, join: str = "CROSS JOIN") -> sql.TextClause:
        """The groups in order, one more than may be."""
        columns = [_COLUMNS[name] for name in self.group]
        clauses = {
            "since": "usage.hour >= :since",
            "until": "usage.hour < :until",
            "model": "usage.model = :model",
        }
        where = [clause for name, clause in clauses.items() if getattr(self, name) is not None]
        sums = [f"CAST(coalesce(sum(usage.{name}), 0) AS BIGINT) AS {name}" for name in _SUMS]
        text = (
            f"{_CLIENTS if self.client is None else _ONE_CLIENT} SELECT {', '.join([*columns, *sums])}"  # noqa: S608
            f" FROM clients {join} usage ON usage.client = clients.client"
        )
        if where:
            text += f" WHERE {' AND '.join(where)}"
        if columns:
            text += f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}"
        return sql.text(f"{text} LIMIT {MAX_GROUPS + 1}")

    def parameters(self) -> dict[str, Any]:
        names = ("since", "until", "client", "model")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def select(connection: sql.Connection, query: UsageQuery, limit_s: float) -> UsageResponse:
    """The usage of a query; raises InvalidRequestError above MAX_GROUPS, DeadlineError if it takes too long."""
    with _limited(connection, limit_s):
        rows = connection.execute(query.statement(_join(connection)), query.parameters()).all()
    if len(rows) > MAX_GROUPS:
        raise InvalidRequestError(f"more than {MAX_GROUPS} groups: choose a shorter period or fewer groups")
    response = UsageResponse(groups=[_group(query.group, row) for row in rows])
    for name in ("since", "until"):
        if (hour := getattr(query, name)) is not None:
            getattr(response, name).CopyFrom(Timestamp(seconds=hour * HOUR_S))
    return response


def forget_some(connection: sql.Connection, before_us: int) -> int:
    """Deletes some of the sums of hours that ended before a time; returns their number."""
    statement = _FORGET.format(join=_join(connection))
    return run(connection, statement, before_us // HOUR_US, _FORGOTTEN_AT_ONCE).rowcount


def _join(connection: sql.Connection) -> str:
    """SQLite needs to be shown the order of the tables, in which PostgreSQL's planner is free."""
    return "JOIN" if is_postgresql(connection) else "CROSS JOIN"


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
        run(connection, f"SET LOCAL statement_timeout = {max(1, round(1000 * limit_s))}")
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
