"""The export: complete, typed, oldest first, beside a running logger, and never a partial file under its name."""

import argparse
import asyncio
import json
import math
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import termios
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from headrace_logger.export import export, shapes, snapshot
from headrace_logger.export.export import instant
from headrace_logger.store.store import Store
from headrace_logger.values import row
from headrace_protos.headrace_pb2 import AppendRequest, GatewayCall, PayloadRecord
from tests.process.test_logger_store import LoggedCall

ROOT = Path(__file__).parents[2]
SOURCE = str(uuid.uuid4())
BEGIN = datetime(2026, 1, 31, 12, tzinfo=UTC)


def append_request(number, **fields):
    record = PayloadRecord(record_id=str(uuid.UUID(int=number)), **({"status": "OK", "model": "m"} | fields))
    record.time.FromDatetime(BEGIN + timedelta(minutes=number))
    return AppendRequest(source=SOURCE, sequence=number, record=record)


def full_request(number):
    request = append_request(
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


async def test_parquet_has_the_same_rows_as_json(store, run, tmp_path):
    await store.append([full_request(1), append_request(2), append_request(3, metadata={"k": "v"})])
    assert run("--output", str(tmp_path / "out.parquet")) == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    expected = [row(request.record) for request in (full_request(1), append_request(2))]
    assert table.num_rows == 3
    assert [{**values, "metadata": dict(values["metadata"])} for values in table.to_pylist()[:2]] == expected
    assert pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


async def test_parquet_opens_in_pandas_with_proper_types(store, run, tmp_path):
    await store.append([full_request(1), append_request(2)])
    assert run("--output", str(tmp_path / "out.parquet")) == 0
    frame = pandas.read_parquet(tmp_path / "out.parquet")
    assert isinstance(frame.time.dtype, pandas.DatetimeTZDtype)
    assert frame.time[0] == pandas.Timestamp("2026-01-31T12:00:00.123456Z")
    assert frame.time.is_monotonic_increasing
    assert frame.ttft_ms.dtype == frame.duration_ms.dtype == "float64"
    assert (frame.ttft_ms[0], math.isnan(frame.ttft_ms[1])) == (3.5, True)
    assert (frame.completion_tokens[0], math.isnan(frame.completion_tokens[1])) == (2, True)
    assert frame.incomplete.dtype == "bool"
    assert frame.resumes.dtype == "int64"
    assert list(frame.chunks[0][0]["token_ids"]) == [7, 8]
    assert dict(frame.metadata[0]) == {"x-team": "a", "x-app": "b"}
    assert frame.inputs[0][0]["data"] == b"\x00\xff"


async def test_parquet_opens_in_duckdb_with_proper_types(store, run, tmp_path):
    await store.append([full_request(1), append_request(2)])
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
    await store.append([append_request(number, model="ab"[number % 2]) for number in (3, 1, 4, 2, 5)])
    choice = ("--since", "2026-01-31T12:02", "--until", "2026-01-31T13:05+01:00", "--model", "a")
    assert run("--format", "jsonl", "--output", str(tmp_path / "out"), *choice) == 0
    assert [line["time"] for line in lines(tmp_path / "out")] == ["2026-01-31T12:02:00Z", "2026-01-31T12:04:00Z"]


async def test_every_record_is_exported_once_oldest_first_over_any_number_of_pages(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS", 7)
    monkeypatch.setattr(snapshot, "_BYTES", 2000)
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 10)
    requests = [append_request(number, prompt="p" * (number % 5 * 400)) for number in range(1, 200)]
    for request in requests:
        # Many have the same time: the order is that of their commits.
        request.record.time.FromDatetime(BEGIN - timedelta(minutes=request.sequence // 50))
    await store.append(requests)
    assert run("--format", "jsonl", "--output", str(tmp_path / "out")) == 0
    numbers = [uuid.UUID(line["record_id"]).int for line in lines(tmp_path / "out")]
    assert numbers == sorted(range(1, 200), key=lambda number: (-(number // 50), number))


async def test_several_row_groups_are_one_file(store, run, tmp_path, monkeypatch):
    from headrace_logger.export import parquet

    monkeypatch.setattr(parquet, "_ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 10)
    await store.append([append_request(number) for number in range(1, 101)])
    assert run("--output", str(tmp_path / "out.parquet")) == 0
    file = pyarrow.parquet.ParquetFile(tmp_path / "out.parquet")
    assert (file.metadata.num_rows, file.metadata.num_row_groups) == (100, 10)


async def test_records_that_are_committed_during_the_export_are_left_to_the_next(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS", 1)
    await store.append([append_request(number) for number in range(1, 4)])
    with snapshot.Snapshot(tmp_path / "payloads.sqlite3", export._filters(export._parse(("--output", "-")))) as taken:
        records = taken.records()
        next(records)
        # The logger writes, deletes and empties its write-ahead log while a slow reader holds the export.
        await store.append([append_request(number) for number in range(4, 7)])
        await store.delete(record_id=str(uuid.UUID(int=2)))
        assert [uuid.UUID(record.record_id).int for record in records] == [3]
    assert not (tmp_path / "payloads.sqlite3-wal").stat().st_size


async def test_the_file_is_private_and_appears_when_it_is_complete(store, run, tmp_path, monkeypatch):
    await store.append([append_request(1)])
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
    fill(tmp_path, [append_request(number) for number in range(1, 4)])
    done = subprocess.run(**command(tmp_path, "--format", "jsonl", "--output", "-"), capture_output=True, check=True)
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == b"export: 3 records\n"
    done = subprocess.run(**command(tmp_path, "--output", "-"), capture_output=True, check=True)
    assert pyarrow.parquet.read_table(pyarrow.BufferReader(done.stdout)).num_rows == 3


def test_a_closed_pipe_and_an_interrupt_end_it_without_a_traceback(tmp_path):
    fill(tmp_path, [append_request(number, prompt="p" * 1000) for number in range(1, 1001)])
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


def test_a_terminal_shows_the_progress(tmp_path):
    fill(tmp_path, [append_request(number) for number in range(1, 4)])
    terminal, its_other_end = os.openpty()
    termios.tcsetwinsize(its_other_end, (24, 100))
    subprocess.run(**command(tmp_path, "--output", str(tmp_path / "out")), stderr=its_other_end, check=True)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    os.close(its_other_end)
    assert "3/3" in shown
    assert "records" in shown


def test_a_wrong_argument_is_refused_with_the_usage(run, capsys):
    for arguments, status in ((("--since", "soon", "--output", "-"), 2), (("--help",), 0)):
        with pytest.raises(SystemExit) as ended:
            run(*arguments)
        assert ended.value.code == status
    printed = capsys.readouterr()
    assert "'soon' is not a date, a time or an age such as 24h" in printed.err
    assert "--until TIME" in printed.out


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:30", datetime(2026, 1, 31, 12, 30, tzinfo=UTC)),
        ("2026-01-31T12:30:00.5+02:00", datetime(2026, 1, 31, 10, 30, 0, 500_000, tzinfo=UTC)),
        ("2026-01-31T12:30:00Z", datetime(2026, 1, 31, 12, 30, tzinfo=UTC)),
        ("90s", BEGIN - timedelta(seconds=90)),
        ("30m", BEGIN - timedelta(minutes=30)),
        ("24h", BEGIN - timedelta(hours=24)),
        ("7d", BEGIN - timedelta(days=7)),
        ("2w", BEGIN - timedelta(days=14)),
    ],
)
def test_a_time_is_a_date_a_time_or_an_age(text, time):
    assert instant(text, BEGIN) == time


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "9999999999w", "2026-13-01", "yesterday"])
def test_malformed_times_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        instant(text, BEGIN)


def generation(number, **fields):
    """A generation with a whole answer, as the transformer records it."""
    whole = {"prompt": "Once", "prompt_kind": "text", "prompt_ids": [5, 6], "sampling": "{}", "finish_reason": "stop"}
    request = append_request(number, **(whole | fields))
    request.record.chunks.add(text=" upon", token_ids=[7])
    request.record.usage.completion_tokens = 1
    return request


async def test_records_without_the_shape_of_a_format_are_counted_by_reason(store, run, tmp_path, capsys):
    await store.append([generation(1), append_request(2), generation(3, finish_reason="length"), append_request(4)])
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
