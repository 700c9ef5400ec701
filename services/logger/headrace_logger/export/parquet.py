"""Writes records to a Parquet file, as rows of `headrace_logger.values`.

`SCHEMA` has the types: times in UTC to the microsecond, lists of structs for chunks and tensors, a map for the
caller's metadata, nullable numbers, counts of 64 bits with a sign. Rows become Arrow batches as they arrive, and every
32 MiB of batches become a row group: memory is bounded for an export of any length.
"""

from collections.abc import Iterable, Sequence
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace_logger.values import columns_of, is_map, is_time, row
from headrace_protos.headrace_pb2 import PayloadRecord

_TYPES = {
    FieldDescriptor.TYPE_STRING: pa.string(),
    FieldDescriptor.TYPE_BYTES: pa.binary(),
    FieldDescriptor.TYPE_BOOL: pa.bool_(),
    FieldDescriptor.TYPE_DOUBLE: pa.float64(),
    FieldDescriptor.TYPE_FLOAT: pa.float32(),
    FieldDescriptor.TYPE_INT32: pa.int32(),
    FieldDescriptor.TYPE_UINT32: pa.uint32(),
    FieldDescriptor.TYPE_INT64: pa.int64(),
    FieldDescriptor.TYPE_UINT64: pa.uint64(),
}
_ROW_GROUP_BYTES = 32 * 1024 * 1024


def _types_of(descriptor: Descriptor) -> dict[str, pa.DataType]:
    return {field.name: _type_of(field) for field in columns_of(descriptor)}


def _type_of(field: FieldDescriptor) -> pa.DataType:
    if is_time(field):
        return pa.timestamp("us", tz="UTC")
    if is_map(field):
        return pa.map_(pa.string(), pa.string())
    one = pa.struct(_types_of(field.message_type)) if field.message_type else _TYPES[field.type]
    if field.is_repeated:
        return pa.list_(one)
    return pa.int64() if field.type == FieldDescriptor.TYPE_UINT32 else one


SCHEMA = pa.schema(_types_of(PayloadRecord.DESCRIPTOR))


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
