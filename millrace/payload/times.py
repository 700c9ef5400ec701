"""The times of a payload record."""

from __future__ import annotations

from millrace_protos.millrace_pb2 import PayloadRecord


def ended_at(record: PayloadRecord) -> float:
    """When it ended, in seconds of the wall clock of the process that recorded it."""
    return record.time.seconds + record.time.nanos / 1e9 + record.duration_ms / 1000
