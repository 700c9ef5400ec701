"""What Query and Tail filter by, said once: as SQL for records that lie in a table, and as a test of one that comes in.

`columns_of` gives the columns that the filters look at. Times are whole microseconds since 1970; a bound between two
of them counts from the next one. A record without a time to first token passes no `min_ttft_ms`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sql
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.protos.millrace_pb2 import PayloadRecord, QueryPayloadsRequest, TailPayloadsRequest

Comparison = Callable[[Any, Any], Any]

# A filter's field → the column it looks at, and how the two must compare. `text_contains` looks into the texts.
_COMPARISONS: Mapping[str, tuple[str, Comparison]] = {
    "model": ("model", operator.eq),
    "since": ("time_us", operator.ge),
    "until": ("time_us", operator.lt),
    "status": ("status", operator.eq),
    "finish_reason": ("finish_reason", operator.eq),
    "request_id": ("request_id", operator.eq),
    "trace_id": ("trace_id", operator.eq),
    "min_duration_ms": ("duration_ms", operator.ge),
    "min_ttft_ms": ("ttft_ms", operator.ge),
}


class Filters:
    """The filters that a request sets; all of them must be passed."""

    def __init__(self, request: QueryPayloadsRequest | TailPayloadsRequest) -> None:
        self.text = request.text_contains
        self._comparisons = [
            (*_COMPARISONS[field.name], _ceil_us(value) if isinstance(value, Timestamp) else value)
            for field, value in request.ListFields()
            if field.name in _COMPARISONS
        ]

    def clauses(self, table: sql.Table) -> list[sql.ColumnElement[bool]]:
        """All but the text, as conditions of a query."""
        return [compare(table.c[column], value) for column, compare, value in self._comparisons]

    def has_text(self, record: PayloadRecord) -> bool:
        """Whether the text that is looked for is in the prompt or in the answer."""
        return self.text in record.prompt or self.text in record.text

    def passes(self, record: PayloadRecord) -> bool:
        """Whether a record passes all of them."""
        columns = columns_of(record)
        return (
            all(
                columns[column] is not None and compare(columns[column], value)
                for column, compare, value in self._comparisons
            )
        ) and self.has_text(record)


def columns_of(record: PayloadRecord) -> dict[str, Any]:
    """What of a record can be filtered by, by the name of its column."""
    return {
        "record_id": record.record_id,
        "time_us": _microseconds(record.time, record.time.nanos // 1_000),
        "model": record.model,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "status": record.status,
        "finish_reason": record.finish_reason,
        "duration_ms": record.duration_ms,
        "ttft_ms": record.ttft_ms if record.HasField("ttft_ms") else None,
    }


def _ceil_us(time: Timestamp) -> int:
    """Records lie at whole microseconds: the first of them that is at or after `time`."""
    return _microseconds(time, -(-time.nanos // 1_000))


def _microseconds(time: Timestamp, fraction_us: int) -> int:
    """Microseconds since 1970, kept within the 64 bits of an SQLite integer."""
    return max(-(2**63), min(time.seconds * 1_000_000 + fraction_us, 2**63 - 1))
