"""Records as Parquet, as rows of `headrace_logger.values`: one file, or a folder with a file for each hour.

`SCHEMA` has the types: times in UTC to the microsecond, lists of structs for chunks and tensors, a map for the
caller's metadata, nullable numbers, counts of 64 bits with a sign. Rows become Arrow batches as they arrive, and every
32 MiB of batches become a row group: memory is bounded for an export of any length.

The log is also written into folders by hour of UTC, `date=2026-01-31/hour=12/payloads-….parquet`, named as Hive names
partitions: readers find `date` and `hour` as columns and skip what a query does not need. Only hours that are over are
exported. The number in a file's name is the position up to which the log was read, so another run writes only what the
log has received since: nothing for most hours, and a further file for an hour whose record came late, such as that of
an answer that took longer. Each record is written once, as long as one export at a time writes to a folder. A call
whose service's record came more than ten seconds after the gateway's line is there as both.

A folder belongs to one database: positions are its own. It is one of this machine, whose files only their owner can
read, or of an object store by its URL. URLs are those of pyarrow's file systems: s3://bucket/prefix, gs://…, abfs://…,
with credentials from the usual variables (AWS_ACCESS_KEY_ID, …) and options in the query
(?region=…&endpoint_override=host:port&scheme=http). A file appears under its name once it is complete.

Errors: StartupError, one line, if the database or the folder cannot be used.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pyarrow import fs

from headrace.errors import StartupError
from headrace.files import private_file
from headrace_logger.export.snapshot import Snapshot, batches, filters_of, name_of
from headrace_logger.settings import Location
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


_SETTLED = timedelta(minutes=1)  # After its end an hour is over: the gateway's lines of its last calls have come.
_PIECE_BYTES = 8 * 1024 * 1024
_NAME = re.compile(r"payloads-(\d+)\.parquet")


def export_hours(database: Location, output: str, since: datetime | None, now: datetime) -> str:
    """Writes the records that are not in the folder yet, of hours that are over; returns a description.

    `since` is rounded down to a whole hour.
    """
    records = files = 0
    filters = filters_of(since and _hour_of(since), _hour_of(now - _SETTLED))
    with closing(Snapshot(database, filters)) as snapshot, open_folder(output) as folder:
        final = snapshot.final_position()
        for hour in snapshot.hours():
            below = f"{datetime.fromtimestamp(hour * 3600, UTC):date=%Y-%m-%d/hour=%H}"
            found = (_NAME.fullmatch(name) for name in folder.names(below))
            exported = max((int(name[1]) for name in found if name), default=0)
            if exported > snapshot.last_ever:
                raise StartupError(
                    f"--output {shown(output)}: it has records that {name_of(database)} never had: name another folder"
                )
            some = batches(snapshot.records_of_hour(hour, after=exported, up_to=final))
            if first := next(some, None):
                with folder.writing(below, f"payloads-{final:012}.parquet") as file:
                    records += write_parquet(file, chain([first], some))
                files += 1
    return f"{records} records in {files} new files"


def _hour_of(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


class Folder:
    """A folder of one of pyarrow's file systems; `name` is its path or URL in errors."""

    def __init__(self, name: str, filesystem: fs.FileSystem, path: str) -> None:
        self._name = name
        self._filesystem = filesystem
        self._path = path

    def names(self, below: str) -> list[str]:
        """The names of the files in a folder below this one, which may be missing."""
        selector = fs.FileSelector(f"{self._path}/{below}", allow_not_found=True)
        with _errors_of(self._name):
            return [info.base_name for info in self._filesystem.get_file_info(selector)]

    @contextmanager
    def writing(self, below: str, name: str) -> Iterator[IO[bytes]]:
        """A new file in a folder below this one; it appears if the block succeeds."""
        if isinstance(self._filesystem, fs.LocalFileSystem):
            folder = Path(self._path) / below
            with _errors_of(self._name):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with private_file(folder / name, str(folder / name)) as file:
                yield file
            return
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with _errors_of(self._name):
                self._upload(file, f"{self._path}/{below}/{name}")

    def _upload(self, file: IO[bytes], path: str) -> None:
        try:
            with self._filesystem.open_output_stream(path) as stream:
                shutil.copyfileobj(file, stream, _PIECE_BYTES)
        except BaseException as error:
            # Closing the stream completes the object, also of an upload that was interrupted.
            if not isinstance(error, OSError):
                self._filesystem.delete_file(path)
            raise


@contextmanager
def open_folder(output: str) -> Iterator[Folder]:
    """The folder of a path or URL; a folder of this machine is created, and locked against other exports."""
    if "://" in output:
        with _errors_of(output):
            filesystem, path = fs.FileSystem.from_uri(output)
    else:
        filesystem, path = fs.LocalFileSystem(), output
    with ExitStack() as stack:
        if isinstance(filesystem, fs.LocalFileSystem):
            stack.enter_context(_locked(Path(path), output))
        yield Folder(output, filesystem, path.rstrip("/"))


def shown(output: str) -> str:
    """The path or URL for messages: without credentials and options."""
    return re.sub(r"://[^/@]*@", "://", output.partition("?")[0]) if "://" in output else output


@contextmanager
def _locked(path: Path, output: str) -> Iterator[None]:
    with _errors_of(output):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"--output {output}: another export writes to it") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _errors_of(output: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        description = getattr(error, "strerror", None) or " ".join(str(error).replace(output, shown(output)).split())
        raise StartupError(f"--output {shown(output)}: {description}") from None
