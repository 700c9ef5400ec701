"""Batches of records, of bounded number and size, for writers that encode many at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace_protos.headrace_pb2 import PayloadRecord

_ROWS = 1000
_BYTES = 2 * 1024 * 1024


def batches(records: Iterable[PayloadRecord]) -> Iterator[list[PayloadRecord]]:
    """The records in order; a batch ends with the record that reaches a bound."""
    batch: list[PayloadRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.ByteSize()
        if len(batch) == _ROWS or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
