"""The payload log as Parquet files in folders by hour of UTC, `date=2026-01-31/hour=12/payloads-….parquet`.

Folders are named as Hive names partitions: readers find `date` and `hour` as columns and skip what a query does not
need. Only hours that are over are exported. The number in a file's name is the position up to which the log was read,
so another run writes only what the log has received since: nothing for most hours, and a further file for an hour whose
record came late, such as that of an answer that took longer. Each record is written once, as long as one export at a
time writes to a folder. A call whose service's record came more than ten seconds after the gateway's line is there as
both.

A folder belongs to one database: positions are its own.

Errors: StartupError, one line, if the database or the folder cannot be used.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from headrace.errors import StartupError
from headrace_logger.export.batches import batches
from headrace_logger.export.folders import Folder, open_folder, shown
from headrace_logger.export.parquet import ParquetWriter
from headrace_logger.export.snapshot import Part, Snapshot
from headrace_logger.store.filters import Filters
from headrace_logger.store.opening import Location, name_of
from headrace_protos.headrace_pb2 import QueryPayloadsRequest

_SETTLED = timedelta(minutes=1)  # After its end an hour is over: the gateway's lines of its last calls have come.
_NAME = re.compile(r"payloads-(\d+)\.parquet")


def export_hours(database: Location, output: str, since: datetime | None, now: datetime) -> str:
    """Writes the records that are not in the folder yet, of hours that are over; returns a description.

    `since` is rounded down to a whole hour.
    """
    records = files = 0
    with Snapshot(database, _filters(since, now)) as snapshot, open_folder(output) as folder:
        final = snapshot.final_position()
        for hour in snapshot.hours():
            below = f"{datetime.fromtimestamp(hour * 3600, UTC):date=%Y-%m-%d/hour=%H}"
            exported = _exported(folder, below)
            if exported > snapshot.last_ever:
                raise StartupError(
                    f"--output {shown(output)}: it has records that {name_of(database)} never had: name another folder"
                )
            count = _write(snapshot, Part(hour, exported, final), folder, below)
            records += count
            files += bool(count)
    return f"{records} records in {files} new files"


def _filters(since: datetime | None, now: datetime) -> Filters:
    request = QueryPayloadsRequest()
    if since is not None:
        request.since.FromDatetime(_hour_of(since))
    request.until.FromDatetime(_hour_of(now - _SETTLED))
    return Filters(request)


def _hour_of(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _exported(folder: Folder, below: str) -> int:
    """The position up to which the log was read for the files of an hour."""
    found = (_NAME.fullmatch(name) for name in folder.names(below))
    return max((int(name[1]) for name in found if name), default=0)


def _write(snapshot: Snapshot, part: Part, folder: Folder, below: str) -> int:
    """Writes the file of a part, if it has records; returns their number."""
    some = batches(snapshot.records(part))
    first = next(some, None)
    if first is None:
        return 0
    with folder.writing(below, f"payloads-{part.last:012}.parquet") as file, ParquetWriter(file) as writer:
        return writer.write(first) + sum(map(writer.write, some))
