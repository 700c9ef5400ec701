"""Writes records to a Parquet file, as rows of `headrace_logger.values`.

`SCHEMA` defines the types: times in UTC to the microsecond, lists of structs for chunks and tensors, a map for the
caller's metadata, nullable numbers. Rows become Arrow batches as they arrive, and every 32 MiB of batches become a row
group: memory is bounded for an export of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from headrace_logger.values import row
from headrace_protos.headrace_pb2 import PayloadRecord

_TENSOR = pa.struct(
    {
        "name": pa.string(),
        "datatype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "digest": pa.string(),
        "size": pa.uint64(),
        "data": pa.binary(),
    }
)
_CHUNK = pa.struct(
    {
        "offset_ms": pa.float64(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "outputs": pa.list_(_TENSOR),
    }
)
_GATEWAY = pa.struct(
    {
        "path": pa.string(),
        "http_status": pa.int64(),
        "response_flags": pa.string(),
        "details": pa.string(),
        "duration_ms": pa.float64(),
        "request_bytes": pa.uint64(),
        "response_bytes": pa.uint64(),
        "upstream": pa.string(),
        "peer": pa.string(),
    }
)
SCHEMA = pa.schema(
    {
        "record_id": pa.string(),
        "time": pa.timestamp("us", tz="UTC"),
        "request_id": pa.string(),
        "model": pa.string(),
        "protocol": pa.string(),
        "prompt": pa.string(),
        "text": pa.string(),
        "finish_reason": pa.string(),
        "status": pa.string(),
        "message": pa.string(),
        "failed_hop": pa.string(),
        "parameters": pa.string(),
        "chunks": pa.list_(_CHUNK),
        "prompt_tokens": pa.int64(),
        "cached_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "ttft_ms": pa.float64(),
        "duration_ms": pa.float64(),
        "engine_ms": pa.float64(),
        "trace_id": pa.string(),
        "span_id": pa.string(),
        "metadata": pa.map_(pa.string(), pa.string()),
        "inputs": pa.list_(_TENSOR),
        "outputs": pa.list_(_TENSOR),
        "resumes": pa.int64(),
        "predictors": pa.list_(pa.struct({"predictor": pa.string(), "offset_ms": pa.float64()})),
        "client": pa.string(),
        "incomplete": pa.bool_(),
        "call_id": pa.string(),
        "fingerprint": pa.string(),
        "served_model": pa.string(),
        "prompt_ids": pa.list_(pa.uint32()),
        "sampling": pa.string(),
        "prompt_kind": pa.string(),
        "gateway": _GATEWAY,
    }
)

_ROW_GROUP_BYTES = 32 * 1024 * 1024


def write_parquet(file: IO[bytes], batches: Iterable[Sequence[PayloadRecord]]) -> int:
    """Writes records to an open file; returns their number."""
    writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")
    group: list[pa.RecordBatch] = []
    count = 0
    try:
        for records in batches:
            group.append(pa.RecordBatch.from_pylist([row(record) for record in records], schema=SCHEMA))
            count += len(records)
            if sum(batch.nbytes for batch in group) >= _ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(group, schema=SCHEMA))
                group = []
        if group:
            writer.write_table(pa.Table.from_batches(group, schema=SCHEMA))
        writer.close()
    finally:
        writer.is_open = False  # Else pyarrow's finalizer would write to a file that is closed.
    return count
