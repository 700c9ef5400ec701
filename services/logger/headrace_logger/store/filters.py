"""The filters of Query and Tail, defined once: as SQL, and as a test of a row of columns.

`columns_of` returns the columns that the filters compare. Times are whole microseconds since 1970; a bound between two
of them is rounded up. A record without a time to first token passes no `min_ttft_ms`. Durations also have a class, four
for each doubling: an index of classes is written at a few places, an index of durations everywhere.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sql
from google.protobuf.timestamp_pb2 import Timestamp

from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest, TailPayloadsRequest

Comparison = Callable[[Any, Any], Any]

# Filter field → its column and the comparison. `text_contains` searches the texts.
_COMPARISONS: Mapping[str, tuple[str, Comparison]] = {
    "model": ("model", operator.eq),
    "since": ("time_us", operator.ge),
    "until": ("time_us", operator.lt),
    "status": ("status", operator.eq),
    "finish_reason": ("finish_reason", operator.eq),
    "request_id": ("request_id", operator.eq),
    "trace_id": ("trace_id", operator.eq),
    "client": ("client", operator.eq),
    "min_duration_ms": ("duration_ms", operator.ge),
    "min_ttft_ms": ("ttft_ms", operator.ge),
}
# Duration column → column of its class.
_CLASSES = {"duration_ms": "duration_class", "ttft_ms": "ttft_class"}
_SHORTEST_MS, _LONGEST_MS = 2.0**-10, 2.0**40


class Filters:
    """The filters that a request sets; a record must pass all of them."""

    def __init__(self, request: QueryPayloadsRequest | TailPayloadsRequest) -> None:
        self.text = request.text_contains
        self._comparisons = [
            # Rounded up, because records have whole microseconds.
            (
                *_COMPARISONS[field.name],
                _microseconds(value, rounds=math.ceil) if isinstance(value, Timestamp) else value,
            )
            for field, value in request.ListFields()
            if field.name in _COMPARISONS
        ]

    def clauses(self, table: sql.Table) -> list[sql.ColumnElement[bool]]:
        """All filters except the text, as conditions of a query."""
        return [compare(table.c[column], value) for column, compare, value in self._comparisons]

    def lookups(self, table: sql.Table) -> list[sql.ColumnElement[bool]]:
        """For each filter except times, a condition on an index; every record that passes the filter fulfils it too."""
        return [
            table.c[_CLASSES[column]] >= class_of(value) if column in _CLASSES else compare(table.c[column], value)
            for column, compare, value in self._comparisons
            if column != "time_us"
        ]

    def has_text(self, record: PayloadRecord) -> bool:
        """Whether the prompt or the answer contains the text."""
        return self.text in record.prompt or self.text in record.text

    @property
    def columns(self) -> set[str]:
        """The columns that `pass_columns` compares."""
        return {column for column, *_ in self._comparisons}

    def pass_columns(self, row: sql.Row[Any]) -> bool:
        """Whether a row passes all filters except the text."""
        found = ((getattr(row, column), compare, value) for column, compare, value in self._comparisons)
        return all(own is not None and compare(own, value) for own, compare, value in found)


def columns_of(record: PayloadRecord) -> dict[str, Any]:
    """The values of a record's own columns by name, always in the same order."""
    ttft_ms = record.ttft_ms if record.HasField("ttft_ms") and not math.isnan(record.ttft_ms) else None
    return {
        "record_id": record.record_id,
        "time_us": _microseconds(record.time, rounds=math.floor),
        "model": record.model,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "client": record.client,
        "status": record.status,
        "finish_reason": record.finish_reason,
        # SQLite keeps no NaN; in PostgreSQL it would be above every bound.
        "duration_ms": None if math.isnan(record.duration_ms) else record.duration_ms,
        "duration_class": class_of(record.duration_ms),
        "ttft_ms": ttft_ms,
        "ttft_class": None if ttft_ms is None else class_of(ttft_ms),
        "call_id": record.call_id or None,
    }


def class_of(ms: float) -> int:
    """The class of a duration; ascending with the duration."""
    return math.floor(4 * math.log2(min(max(_SHORTEST_MS, ms), _LONGEST_MS)))


def _microseconds(time: Timestamp, rounds: Callable[[float], int]) -> int:
    """Microseconds since 1970, clamped to the 64 bits of an SQLite integer."""
    return max(-(2**63), min(time.seconds * 1_000_000 + rounds(time.nanos / 1_000), 2**63 - 1))
