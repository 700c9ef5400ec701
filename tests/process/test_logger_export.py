"""Exports and backups: complete, beside a running logger, and never a partial file under its name."""

import argparse
import asyncio
import fcntl
import json
import math
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import fs

from headrace.errors import StartupError
from headrace_logger import backup as backup_module
from headrace_logger.backup import backup
from headrace_logger.backup import main as copy_database
from headrace_logger.export import export, parquet, shapes, snapshot
from headrace_logger.export.export import instant
from headrace_logger.export.parquet import export_hours
from headrace_logger.store import reading
from headrace_logger.store.store import Store
from headrace_logger.store.tables import SCHEMA_VERSION
from headrace_protos.headrace_pb2 import GatewayCall, PayloadRecord
from tests.support.payload_records import LoggedCall, append_request

ROOT = Path(__file__).parents[2]
BEGIN = datetime(2026, 1, 31, 12, tzinfo=UTC)


def recorded(number, time=None, **fields):
    request = append_request(number, **({"status": "OK", "model": "m"} | fields))
    request.record.time.FromDatetime(time or BEGIN + timedelta(minutes=number))
    return request


def full_request(number):
    request = recorded(
        number,
        request_id="r",
        protocol="headrace.v1.TextGeneration/Generate",
        prompt="où?\x00😀",
        text="là",
        finish_reason="stop",
        parameters='{"max_tokens": 2}',
        ttft_ms=3.5,
        duration_ms=4.25,
        metadata={"x-team": "a", "x-app": "b"},
        trace_id="0af7651916cd43dd8448eb211c80319c",
        incomplete=True,
        resumes=1,
        call_id=f"call-{number}",
    )
    request.record.time.FromDatetime(BEGIN.replace(microsecond=123_456))
    request.record.usage.prompt_tokens = 3
    request.record.usage.completion_tokens = 2
    request.record.chunks.add(offset_ms=3.5, text="l", token_ids=[7, 8], logprobs=[-0.5, -math.inf])
    request.record.chunks.add(offset_ms=4.0, text="à")
    request.record.inputs.add(name="x", datatype="FP32", shape=[1, 2], digest="sha256:00", data=b"\x00\xff", size=2)
    request.record.inputs.add(name="y", datatype="BYTES", shape=[], digest="sha256:01")
    return request


@pytest.fixture
def run(tmp_path):
    """Runs the command in this process; the exit code."""
    return lambda *arguments: export.main(("--database", str(tmp_path / "payloads.sqlite3"), *arguments))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_of_json_holds_every_field_of_the_record(store, run, tmp_path):
    call = PayloadRecord(call_id="call-1", gateway=GatewayCall(path="/p", http_status=200, request_bytes=2**63))
    await store.append([full_request(1)])
    await store.add_calls([LoggedCall(call)])
    assert run("--format", "jsonl", "--output", str(tmp_path / "out.jsonl")) == 0
    (exported,) = lines(tmp_path / "out.jsonl")
    assert exported["time"] == "2026-01-31T12:00:00.123456Z"
    assert exported["prompt"] == "où?\x00😀"
    assert (exported["prompt_tokens"], exported["cached_tokens"], exported["completion_tokens"]) == (3, 0, 2)
    assert exported["chunks"][0] == {
        "offset_ms": 3.5,
        "text": "l",
        "token_ids": [7, 8],
        "logprobs": [-0.5, None],
        "outputs": [],
    }
    assert exported["inputs"][0] == {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 2],
        "digest": "sha256:00",
        "size": 2,
        "data": "AP8=",
    }
    assert exported["inputs"][1]["data"] is None
    assert exported["metadata"] == {"x-team": "a", "x-app": "b"}
    assert exported["gateway"]["request_bytes"] == 2**63
    # All fields of a record are exported, except those for pages and REST.
    fields = {field.name for field in PayloadRecord.DESCRIPTOR.fields} - {"usage", "page_token", "error"}
    assert exported.keys() == fields | {"prompt_tokens", "cached_tokens", "completion_tokens"}


async def test_parquet_opens_in_duckdb_with_proper_types(store, run, tmp_path):
    await store.append([full_request(1), recorded(2)])
    assert run("--output", str(tmp_path / "out.parquet")) == 0
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        file = connection.from_parquet(str(tmp_path / "out.parquet"))
        types = dict(zip(file.columns, map(str, file.types), strict=True))
        assert types["time"] == "TIMESTAMP WITH TIME ZONE"
        assert types["metadata"] == "MAP(VARCHAR, VARCHAR)"
        assert types["ttft_ms"] == "DOUBLE"
        assert types["completion_tokens"] == "BIGINT"
        assert types["incomplete"] == "BOOLEAN"
        assert types["resumes"] == "BIGINT"
        assert types["chunks"].startswith('STRUCT(offset_ms DOUBLE, "text" VARCHAR, token_ids INTEGER[]')
        assert types["chunks"].endswith(")[]")
        connection.register("log", file)
        found = connection.execute(
            "SELECT epoch_us(time), metadata['x-team'], chunks[1].token_ids, list_sum([c.offset_ms FOR c IN chunks]),"
            " completion_tokens, inputs[1].data FROM log WHERE time < TIMESTAMPTZ '2026-01-31 12:01:00Z'"
        ).fetchall()
        assert found == [(1_769_860_800_123_456, "a", [7, 8], 7.5, 2, b"\x00\xff")]
        assert connection.execute("SELECT count(*) FROM log WHERE ttft_ms IS NULL").fetchone() == (1,)


async def test_an_empty_log_is_a_file_with_columns(store, run, tmp_path):
    assert run("--output", str(tmp_path / "out.parquet")) == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert (table.num_rows, "chunks" in table.column_names) == (0, True)
    assert run("--format", "jsonl", "--output", str(tmp_path / "out.jsonl")) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


async def test_filters_choose_the_exported_records(store, run, tmp_path):
    await store.append([recorded(number, model="ab"[number % 2]) for number in (3, 1, 4, 2, 5)])
    choice = ("--since", "2026-01-31T12:02", "--until", "2026-01-31T13:05+01:00", "--model", "a")
    assert run("--format", "jsonl", "--output", str(tmp_path / "out"), *choice) == 0
    assert [line["time"] for line in lines(tmp_path / "out")] == ["2026-01-31T12:02:00Z", "2026-01-31T12:04:00Z"]


async def test_every_record_is_exported_once_oldest_first_over_any_number_of_pages(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS", 7)
    monkeypatch.setattr(snapshot, "_BYTES", 2000)
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 10)
    requests = [recorded(number, prompt="p" * (number % 5 * 400)) for number in range(1, 200)]
    for request in requests:
        # Many have the same time: the order is that of their commits.
        request.record.time.FromDatetime(BEGIN - timedelta(minutes=request.sequence // 50))
    await store.append(requests)
    assert run("--format", "jsonl", "--output", str(tmp_path / "out")) == 0
    numbers = [uuid.UUID(line["record_id"]).int for line in lines(tmp_path / "out")]
    assert numbers == sorted(range(1, 200), key=lambda number: (-(number // 50), number))


async def test_records_that_are_committed_during_the_export_are_left_to_the_next(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS", 1)
    await store.append([recorded(number) for number in range(1, 4)])
    with closing(snapshot.Snapshot(tmp_path / "payloads.sqlite3", snapshot.filters_of(None, None))) as taken:
        records = taken.records()
        next(records)
        # The logger writes, deletes and empties its write-ahead log while a slow reader holds the export.
        await store.append([recorded(number) for number in range(4, 7)])
        await store.delete(record_id=str(uuid.UUID(int=2)))
        assert [uuid.UUID(record.record_id).int for record in records] == [3]
    assert not (tmp_path / "payloads.sqlite3-wal").stat().st_size


async def test_the_file_is_private_and_appears_when_it_is_complete(store, run, tmp_path, monkeypatch):
    await store.append([recorded(1)])
    out = tmp_path / "folder" / "out.jsonl"
    out.parent.mkdir()
    out.write_text("the one before")

    def fail(_):
        assert out.read_text() == "the one before"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shapes, "to_json", fail)
    assert run("--format", "jsonl", "--output", str(out)) == 1
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "the one before"
    monkeypatch.undo()
    assert run("--format", "jsonl", "--output", str(out)) == 0
    assert len(lines(out)) == 1
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_impossible_exports_are_refused_in_one_line(run, tmp_path, capsys):
    database = tmp_path / "payloads.sqlite3"
    for prepare, message in (
        (lambda: None, "no such database"),
        (lambda: database.write_bytes(b"x" * 5000), "file is not a database"),
        (lambda: (database.unlink(), sqlite3.connect(database).close(), database.touch()), "is not a payload log"),
    ):
        prepare()
        assert run("--output", str(tmp_path / "out")) == 1
        error = capsys.readouterr().err
        assert re.fullmatch(rf"export: [^\n]*{message}[^\n]*\n", error), error
    assert not (tmp_path / "out").exists()


async def test_a_missing_folder_is_refused_in_one_line(store, run, tmp_path, capsys):
    assert run("--output", str(tmp_path / "nowhere" / "out")) == 1
    assert capsys.readouterr().err.endswith("/nowhere/out: No such file or directory\n")


def fill(tmp_path, requests):
    """Writes a database with a logger's store, which is closed again."""

    async def append():
        store = Store(tmp_path / "payloads.sqlite3")
        await store.append(requests)
        await store.close()

    asyncio.run(append())


def command(tmp_path, *arguments):
    environment = os.environ | {"LOGGER_DATABASE": str(tmp_path / "payloads.sqlite3")}
    return {"args": (sys.executable, "-m", "headrace_logger", "export", *arguments), "cwd": ROOT, "env": environment}


def test_the_command_writes_to_a_pipe_and_finds_the_database_by_the_loggers_setting(tmp_path):
    fill(tmp_path, [recorded(number) for number in range(1, 4)])
    done = subprocess.run(**command(tmp_path, "--output", "-"), capture_output=True, check=True)
    assert done.stderr == b"export: 3 records\n"
    assert pyarrow.parquet.read_table(pyarrow.BufferReader(done.stdout)).num_rows == 3


def test_a_closed_pipe_and_an_interrupt_end_it_without_a_traceback(tmp_path):
    fill(tmp_path, [recorded(number, prompt="p" * 1000) for number in range(1, 1001)])
    with subprocess.Popen(
        **command(tmp_path, "--format", "jsonl", "--output", "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
    with subprocess.Popen(
        **command(tmp_path, "--format", "jsonl", "--output", "-"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background job ignores the interrupt, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()  # It may still have to write, and a full pipe would block it.
        assert process.wait(60) == 130
        assert process.stderr.read() == b"export: interrupted\n"


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:30:00.5+02:00", datetime(2026, 1, 31, 10, 30, 0, 500_000, tzinfo=UTC)),
        ("30m", BEGIN - timedelta(minutes=30)),
        ("2w", BEGIN - timedelta(days=14)),
    ],
)
def test_a_time_is_a_date_a_time_or_an_age(text, time):
    assert instant(text, BEGIN) == time


@pytest.mark.parametrize("text", ["", "24", "-1h", "9999999999w", "2026-13-01", "yesterday"])
def test_malformed_times_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        instant(text, BEGIN)


def generation(number, **fields):
    """A generation with a whole answer, as the transformer records it."""
    whole = {"prompt": "Once", "prompt_kind": "text", "prompt_ids": [5, 6], "sampling": "{}", "finish_reason": "stop"}
    request = recorded(number, **(whole | fields))
    request.record.chunks.add(text=" upon", token_ids=[7])
    request.record.usage.completion_tokens = 1
    return request


async def test_records_without_the_shape_of_a_format_are_counted_by_reason(store, run, tmp_path, capsys):
    await store.append([generation(1), recorded(2), generation(3, finish_reason="length"), recorded(4)])
    assert run("--format", "chat", "--output", str(tmp_path / "chat.jsonl")) == 0
    assert lines(tmp_path / "chat.jsonl") == [{"prompt": "Once", "completion": " upon"}]
    assert capsys.readouterr().err == (
        "export: 1 records\n"
        "export: left out 2: not generations\n"
        "export: left out 1: answer cut off at its maximum of tokens\n"
    )


async def test_a_trace_begins_anew_with_each_export(store, run, tmp_path):
    await store.append([generation(1), generation(3), generation(4, prompt_ids=[7])])
    whole = [
        {"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [0]},
        {"timestamp": 120_000, "input_length": 2, "output_length": 1, "hash_ids": [0]},
        {"timestamp": 180_000, "input_length": 1, "output_length": 1, "hash_ids": [1]},
    ]
    for _ in range(2):
        assert run("--format", "mooncake", "--output", str(tmp_path / "trace.jsonl")) == 0
        assert lines(tmp_path / "trace.jsonl") == whole
    assert run("--format", "mooncake", "--since", "2026-01-31T12:04", "--output", str(tmp_path / "trace.jsonl")) == 0
    assert lines(tmp_path / "trace.jsonl") == [{**whole[2], "timestamp": 0, "hash_ids": [0]}]


HOUR = BEGIN
AFTERNOON = HOUR + timedelta(hours=3)


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
    await store.append([recorded(number, time) for number, time in enumerate(times, 1)])
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
    await store.append([recorded(1, HOUR), recorded(2, HOUR + timedelta(hours=1))])
    assert hours() == "2 records in 2 new files"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "lake").rglob("*.parquet")}
    assert hours() == "0 records in 0 new files"
    # Two records of an hour that was exported.
    await store.append([recorded(3, HOUR), recorded(4, HOUR)])
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
    await store.append([recorded(2, HOUR)])
    # The call is before the record: a file with the record's position would hide it from the next run.
    assert hours() == "0 records in 0 new files"
    monkeypatch.setattr(reading, "RECORD_LATE_S", 0.0)
    assert hours() == "2 records in 1 new files"


async def test_since_is_rounded_down_to_the_hour(store, hours, tmp_path):
    await store.append([recorded(number, HOUR + timedelta(minutes=20 * number)) for number in range(6)])
    assert hours(since=HOUR + timedelta(minutes=90)) == "3 records in 1 new files"
    assert hours() == "3 records in 1 new files"
    assert list(files(tmp_path / "lake").values()) == [[0, 1, 2], [3, 4, 5]]


async def test_a_folder_of_another_database_is_refused(store, hours, tmp_path):
    await store.append([recorded(1, HOUR)])
    (tmp_path / "lake" / "date=2026-01-31" / "hour=12").mkdir(parents=True)
    (tmp_path / "lake" / "date=2026-01-31" / "hour=12" / "payloads-000000000009.parquet").touch()
    with pytest.raises(StartupError, match=r"records that .* never had: name another folder"):
        hours()


async def test_an_export_that_fails_leaves_no_file_and_the_next_continues(store, hours, tmp_path, monkeypatch):
    await store.append([recorded(1, HOUR), recorded(2, HOUR + timedelta(hours=1))])
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
    await store.append([recorded(number, HOUR + timedelta(hours=number % 2)) for number in range(1, 6)])
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
    await store.append([recorded(1, HOUR)])
    for _ in range(2):
        hours(output=f"file://{tmp_path}/lake")
    assert list(files(tmp_path / "lake").values()) == [[1]]
    with pytest.raises(StartupError, match=r"^--output nowhere://lake: "):
        hours(output="nowhere://lake")


def test_messages_name_a_url_without_its_credentials():
    assert parquet.shown("s3://id:secret@bucket/prefix?endpoint_override=host") == "s3://bucket/prefix"
    assert parquet.shown("a/folder@home?") == "a/folder@home?"


def test_an_upload_that_is_interrupted_leaves_no_object(tmp_path, monkeypatch):
    def interrupt(file, stream, size):
        stream.write(file.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet.shutil, "copyfileobj", interrupt)
    folder = parquet.Folder("mock://", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "")
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


@pytest.mark.parametrize("wrong", [("--model", "m"), ("--until", "24h"), ("--format", "jsonl"), ("--output", "-")])
def test_a_part_of_an_hour_is_refused(wrong, capsys):
    with pytest.raises(SystemExit, check=lambda error: error.code == 2):
        export.main(("--partition", "hour", "--output", "lake", *wrong))
    assert re.search("--partition goes with --format parquet", capsys.readouterr().err)


def append_requests(first, last):
    return [append_request(number, prompt="p" * 3000, client="c") for number in range(first, last + 1)]


async def append_and_close(path, first, last):
    """Appends records with a logger's store, which is closed again."""
    store = Store(path)
    await store.append(append_requests(first, last))
    await store.close()


def numbers_in(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT record_id FROM records ORDER BY position").fetchall()
    return [uuid.UUID(row[0]).int for row in rows]


@pytest.fixture
def database(tmp_path):
    return tmp_path / "payloads.sqlite3"


@pytest.fixture
def run_copy(database):
    """Runs a command in this process; the exit code."""
    return lambda command, *arguments: copy_database(command, ("--database", str(database), *map(str, arguments)))


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


async def test_a_backup_is_the_state_at_its_begin_though_the_logger_commits_after_every_page(
    store, database, tmp_path, monkeypatch
):
    monkeypatch.setattr(backup_module, "_PAGES", 1)
    await store.append(append_requests(1, 20))
    loop = asyncio.get_running_loop()
    written = 20

    def commit(status, remaining, total):
        # A backup that starts again after a commit would never end; one that blocks the logger would not go on.
        nonlocal written
        written += 1
        assert written < 1000
        asyncio.run_coroutine_threadsafe(store.append(append_requests(written, written)), loop).result(10)

    count = await asyncio.to_thread(backup, database, tmp_path / "copy", commit)
    assert count == 20
    assert numbers_in(tmp_path / "copy") == list(range(1, 21))
    assert written > 40
    assert numbers_in(database) == list(range(1, written + 1))


async def test_a_backup_is_one_private_file_that_appears_when_it_is_complete(store, database, tmp_path, monkeypatch):
    monkeypatch.setattr(backup_module, "_PAGES", 1)
    await store.append(append_requests(1, 20))
    folder = tmp_path / "backups"
    folder.mkdir()
    (folder / "copy").write_text("the one before")

    def interrupt(status, remaining, total):
        assert (folder / "copy").read_text() == "the one before"
        if remaining < total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(database, folder / "copy", interrupt)
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_text() == "the one before"
    backup(database, folder / "copy")
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert stat.S_IMODE((folder / "copy").stat().st_mode) == 0o600
    assert numbers_in(folder / "copy") == list(range(1, 21))


async def test_a_logger_goes_on_with_a_restored_database(database, run_copy, tmp_path, capsys):
    await append_and_close(database, 1, 3)
    assert run_copy("backup", tmp_path / "copy") == 0
    assert one_line(capsys) == "backup: 3 records\n"
    new = tmp_path / "new" / "payloads.sqlite3"
    assert copy_database("restore", (str(tmp_path / "copy"), "--database", str(new))) == 0
    assert one_line(capsys) == "restore: 3 records\n"
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    await append_and_close(new, 3, 4)  # The third has arrived before.
    assert numbers_in(new) == [1, 2, 3, 4]


async def test_a_database_is_replaced_by_force_only(database, run_copy, tmp_path, capsys):
    await append_and_close(database, 1, 3)
    run_copy("backup", tmp_path / "copy")
    await append_and_close(database, 4, 40)
    capsys.readouterr()
    assert run_copy("restore", tmp_path / "copy") == 1
    assert "exists: --force replaces it" in one_line(capsys)
    assert len(numbers_in(database)) == 40
    assert run_copy("restore", "--force", tmp_path / "copy") == 0
    assert numbers_in(database) == [1, 2, 3]


async def test_what_a_killed_logger_left_in_its_write_ahead_log_does_not_return(database, run_copy, tmp_path):
    await append_and_close(database, 1, 3)
    run_copy("backup", tmp_path / "copy")
    script = (
        "import asyncio, os, sys; from pathlib import Path; from headrace_logger.store.store import Store\n"
        "from tests.support.payload_records import append_request\n"
        "async def main():\n"
        "    await Store(Path(sys.argv[1])).append([append_request(n) for n in range(4, 10)]); os._exit(0)\n"
        "asyncio.run(main())"
    )
    await asyncio.to_thread(subprocess.run, (sys.executable, "-c", script, str(database)), cwd=ROOT, check=True)
    assert "payloads.sqlite3-wal" in os.listdir(tmp_path)
    assert run_copy("restore", "--force", tmp_path / "copy") == 0
    assert numbers_in(database) == [1, 2, 3]


async def test_a_restore_refuses_while_a_logger_uses_the_database(store, database, run_copy, tmp_path):
    await store.append(append_requests(1, 3))
    backup(database, tmp_path / "copy")
    await store.append(append_requests(4, 4))
    # In a process of its own, as the locks of one process know each other.
    command = (sys.executable, "-m", "headrace_logger", "restore", "--force", str(tmp_path / "copy"))
    environment = os.environ | {"LOGGER_DATABASE": str(database)}
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"restore: [^\n]* is in use: stop its logger[^\n]*\n", done.stderr)
    await store.append(append_requests(5, 5))
    assert numbers_in(database) == [1, 2, 3, 4, 5]
    await store.close()
    assert run_copy("restore", "--force", tmp_path / "copy") == 0
    assert numbers_in(database) == [1, 2, 3]


async def test_a_restore_that_is_killed_leaves_what_was_there(database, tmp_path):
    await append_and_close(database, 1, 1200)
    backup(database, tmp_path / "copy")
    await append_and_close(database, 1201, 1203)
    script = (
        "import os, signal, sys; from pathlib import Path; from headrace_logger import backup\n"
        "backup._PAGES = 50\n"
        "def die(status, remaining, total):\n"
        "    if remaining < total / 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.restore(Path(sys.argv[1]), Path(sys.argv[2]), True, die)"
    )
    command = (sys.executable, "-c", script, str(tmp_path / "copy"), str(database))
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    # It had begun to overwrite pages.
    assert (tmp_path / "payloads.sqlite3-journal").stat().st_size > 100_000
    assert numbers_in(database) == list(range(1, 1204))


def damage(path):
    """Overwrites the second half of the file."""
    half = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(half)
        file.write(b"\xff" * half)


async def test_damaged_files_are_neither_backed_up_nor_restored(database, run_copy, tmp_path, capsys):
    await append_and_close(database, 1, 40)
    run_copy("backup", tmp_path / "copy")
    damage(database)
    damage(tmp_path / "copy")
    capsys.readouterr()
    assert run_copy("backup", tmp_path / "second") == 1
    assert re.search(r"second(: database disk image is malformed| is damaged: )", one_line(capsys))
    assert not (tmp_path / "second").exists()
    assert run_copy("restore", "--force", tmp_path / "copy") == 1
    assert re.search(r"copy(: database disk image is malformed| is damaged: )", one_line(capsys))


async def test_impossible_commands_are_refused_in_one_line(database, run_copy, tmp_path, capsys):
    other, newer = tmp_path / "other", tmp_path / "newer"
    other.write_bytes(b"x" * 5000)
    assert run_copy("backup", tmp_path / "copy") == 1
    assert "payloads.sqlite3: no such file" in one_line(capsys)
    await append_and_close(database, 1, 1)
    backup(database, newer)
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("UPDATE schema_version SET version = version + 1")
        connection.commit()
    sqlite3.connect(tmp_path / "empty").close()
    (tmp_path / "empty").touch()
    for command, file, message in (
        ("backup", database, "is the database itself"),
        ("backup", tmp_path / "nowhere" / "copy", "copy: No such file or directory"),
        ("restore", database, "is the database itself"),
        ("restore", tmp_path / "missing", "missing: no such file"),
        ("restore", other, "other: file is not a database"),
        ("restore", tmp_path / "empty", "empty is not a payload log"),
        ("restore", newer, f"newer has schema version {SCHEMA_VERSION + 1}, this logger knows {SCHEMA_VERSION}"),
    ):
        assert run_copy(command, *(("--force",) if command == "restore" else ()), file) == 1
        assert message in one_line(capsys)
    assert numbers_in(database) == [1]
