"""Parquet by hour: whole hours alone, each record once however often it runs, and readers that find the partitions."""

import fcntl
import os
import re
import stat
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import fs

from headrace.errors import StartupError
from headrace_logger.export import export, partitions
from headrace_logger.export.partitions import export_hours
from headrace_logger.store import reading
from headrace_protos.headrace_pb2 import AppendRequest, GatewayCall, PayloadRecord
from tests.process.test_logger_store import LoggedCall

SOURCE = str(uuid.uuid4())
HOUR = datetime(2026, 1, 31, 12, tzinfo=UTC)
AFTERNOON = HOUR + timedelta(hours=3)


def append_request(number, time):
    record = PayloadRecord(record_id=str(uuid.UUID(int=number)), model="m", status="OK", prompt="p")
    record.time.FromDatetime(time)
    return AppendRequest(source=SOURCE, sequence=number, record=record)


@pytest.fixture
def hours(tmp_path):
    """Exports by hour to a folder, at a time; the description."""

    def run(now=AFTERNOON, since=None, output=tmp_path / "lake"):
        return export_hours(tmp_path / "payloads.sqlite3", str(output), since, now)

    return run


def files(folder):
    """The numbers of the records in each file."""
    return {
        str(path.relative_to(folder)): [
            uuid.UUID(value).int
            for value in pyarrow.parquet.ParquetFile(path).read(["record_id"]).column(0).to_pylist()
        ]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def test_each_hour_that_is_over_has_a_private_file(store, hours, tmp_path):
    times = (HOUR, HOUR + timedelta(minutes=59, seconds=59), HOUR + timedelta(hours=1), HOUR + timedelta(hours=12))
    await store.append([append_request(number, time) for number, time in enumerate(times, 1)])
    assert hours(HOUR + timedelta(hours=13)) == "3 records in 2 new files"
    # The last hour is over a minute after its end.
    assert files(tmp_path / "lake") == {
        "date=2026-01-31/hour=12/payloads-000000000004.parquet": [1, 2],
        "date=2026-01-31/hour=13/payloads-000000000004.parquet": [3],
    }
    assert hours(HOUR + timedelta(hours=13, minutes=1)) == "1 records in 1 new files"
    written = tmp_path / "lake" / "date=2026-02-01" / "hour=00" / "payloads-000000000004.parquet"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


async def test_another_run_writes_nothing_twice_and_what_came_late(store, hours, tmp_path):
    await store.append([append_request(1, HOUR), append_request(2, HOUR + timedelta(hours=1))])
    assert hours() == "2 records in 2 new files"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "lake").rglob("*.parquet")}
    assert hours() == "0 records in 0 new files"
    # Two records of an hour that was exported.
    await store.append([append_request(3, HOUR), append_request(4, HOUR)])
    assert hours() == "2 records in 1 new files"
    assert hours() == "0 records in 0 new files"
    assert files(tmp_path / "lake") == {
        "date=2026-01-31/hour=12/payloads-000000000002.parquet": [1],
        "date=2026-01-31/hour=12/payloads-000000000004.parquet": [3, 4],
        "date=2026-01-31/hour=13/payloads-000000000002.parquet": [2],
    }
    assert {path: path.stat().st_mtime_ns for path in before} == before


async def test_a_call_that_a_record_may_replace_waits_for_the_next_run(store, hours, tmp_path, monkeypatch):
    call = PayloadRecord(call_id="call", record_id=str(uuid.UUID(int=1)), gateway=GatewayCall(path="/p"))
    call.time.FromDatetime(HOUR)
    await store.add_calls([LoggedCall(call, may_be_recorded=True)])
    await store.append([append_request(2, HOUR)])
    # The call is before the record: a file with the record's position would hide it from the next run.
    assert hours() == "0 records in 0 new files"
    monkeypatch.setattr(reading, "RECORD_LATE_S", 0.0)
    assert hours() == "2 records in 1 new files"


async def test_since_is_rounded_down_to_the_hour(store, hours, tmp_path):
    await store.append([append_request(number, HOUR + timedelta(minutes=20 * number)) for number in range(6)])
    assert hours(since=HOUR + timedelta(minutes=90)) == "3 records in 1 new files"
    assert hours() == "3 records in 1 new files"
    assert list(files(tmp_path / "lake").values()) == [[0, 1, 2], [3, 4, 5]]


async def test_a_folder_of_another_database_is_refused(store, hours, tmp_path):
    await store.append([append_request(1, HOUR)])
    (tmp_path / "lake" / "date=2026-01-31" / "hour=12").mkdir(parents=True)
    (tmp_path / "lake" / "date=2026-01-31" / "hour=12" / "payloads-000000000009.parquet").touch()
    with pytest.raises(StartupError, match=r"records that .* never had: name another folder"):
        hours()


async def test_an_export_that_fails_leaves_no_file_and_the_next_continues(store, hours, tmp_path, monkeypatch):
    await store.append([append_request(1, HOUR), append_request(2, HOUR + timedelta(hours=1))])
    write = pyarrow.parquet.ParquetWriter.write_table
    calls = []

    def fail_the_second_time(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", fail_the_second_time)
    with pytest.raises(StartupError, match="No space left on device"):
        hours()
    assert list(files(tmp_path / "lake").values()) == [[1]]
    assert hours() == "1 records in 1 new files"


async def test_duckdb_and_pyarrow_find_the_partitions(store, hours, tmp_path):
    await store.append([append_request(number, HOUR + timedelta(hours=number % 2)) for number in range(1, 6)])
    hours()
    with duckdb.connect() as connection:
        source = f"read_parquet('{tmp_path}/lake/*/*/*.parquet', hive_partitioning = true)"
        counted = f"SELECT CAST(date AS VARCHAR), CAST(hour AS INTEGER), count(*) FROM {source} GROUP BY ALL ORDER BY 2"
        assert connection.sql(counted).fetchall() == [("2026-01-31", 12, 2), ("2026-01-31", 13, 3)]
    table = pyarrow.parquet.read_table(tmp_path / "lake", filters=[("hour", "=", 13)])
    assert table.num_rows == 3


async def test_one_export_at_a_time_writes_to_a_folder(store, hours, tmp_path):
    (tmp_path / "lake").mkdir()
    other = os.open(tmp_path / "lake", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(StartupError, match="another export writes to it"):
        hours()
    os.close(other)
    assert hours() == "0 records in 0 new files"


async def test_a_url_is_one_of_pyarrows_file_systems(store, hours, tmp_path):
    await store.append([append_request(1, HOUR)])
    for _ in range(2):
        hours(output=f"file://{tmp_path}/lake")
    assert list(files(tmp_path / "lake").values()) == [[1]]
    with pytest.raises(StartupError, match=r"^--output nowhere://lake: "):
        hours(output="nowhere://lake")


def test_messages_name_a_url_without_its_credentials():
    assert partitions.shown("s3://id:secret@bucket/prefix?endpoint_override=host") == "s3://bucket/prefix"
    assert partitions.shown("a/folder@home?") == "a/folder@home?"


def test_an_upload_that_is_interrupted_leaves_no_object(tmp_path, monkeypatch):
    def interrupt(file, stream, size):
        stream.write(file.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(partitions.shutil, "copyfileobj", interrupt)
    folder = partitions.Folder("mock://", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "")
    (tmp_path / "below").mkdir()
    with pytest.raises(KeyboardInterrupt), folder.writing("below", "name") as file:
        file.write(b"contents")
    assert list(Path(tmp_path / "below").iterdir()) == []
    monkeypatch.undo()
    with folder.writing("below", "name") as file:
        file.write(b"contents")
    assert (tmp_path / "below" / "name").read_bytes() == b"contents"
    assert folder.names("below") == ["name"]
    assert folder.names("missing") == []


async def test_the_command_takes_the_hours_up_to_now(store, tmp_path, capsys):
    await store.append([append_request(1, HOUR)])
    database, lake = str(tmp_path / "payloads.sqlite3"), str(tmp_path / "lake")
    assert export.main(("--partition", "hour", "--database", database, "--output", lake)) == 0
    assert capsys.readouterr().err == "export: 1 records in 1 new files\n"


@pytest.mark.parametrize("wrong", [("--model", "m"), ("--until", "24h"), ("--format", "jsonl"), ("--output", "-")])
def test_a_part_of_an_hour_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        export.main(("--partition", "hour", "--output", "lake", *wrong))
    assert ended.value.code == 2
    assert re.search("--partition goes with --format parquet", capsys.readouterr().err)
