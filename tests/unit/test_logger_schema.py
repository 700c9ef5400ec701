"""A file of an earlier logger keeps every record; queries use an index."""

import math
import sqlite3
import uuid

import pytest
import sqlalchemy as sql
from sqlalchemy.dialects import sqlite

from headrace_logger.store import reading
from headrace_logger.store.filters import Filters
from headrace_logger.store.schema import SCHEMA_VERSION
from headrace_logger.store.store import SqliteStore
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest
from tests.process.test_logger_store import append_request, numbers, record_id, stored, timestamp

# The schema of version 1.
VERSION_1 = """
CREATE TABLE records (
    record_id VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    sequence BIGINT NOT NULL,
    time_us BIGINT NOT NULL,
    model VARCHAR NOT NULL,
    request_id VARCHAR NOT NULL,
    trace_id VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    finish_reason VARCHAR NOT NULL,
    duration_ms DOUBLE,
    ttft_ms DOUBLE,
    body BLOB NOT NULL,
    PRIMARY KEY (record_id),
    UNIQUE (source, sequence)
);
CREATE INDEX records_by_status ON records (status, record_id);
CREATE INDEX records_by_finish_reason ON records (finish_reason, record_id);
CREATE INDEX records_by_range ON records (record_id, time_us, duration_ms, ttft_ms);
CREATE INDEX records_by_model ON records (model, record_id);
CREATE INDEX records_by_request_id ON records (request_id, record_id);
CREATE INDEX records_by_trace_id ON records (trace_id, record_id);
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
"""


def record(number):
    made = PayloadRecord(record_id=record_id(number), model=f"m{number % 2}", status="OK", prompt="où?" * 2000)
    made.time.FromMicroseconds(1_700_000_000_000_000 + number)
    return made


@pytest.fixture
def old_file(tmp_path):
    """50 records of two sources, committed in another order than that of their ids."""
    path = tmp_path / "payloads.sqlite3"
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1)
    for number in range(50, 0, -1):
        one = record(number)
        row = (one.record_id, f"source-{number % 3}", number, one.time.ToMicroseconds(), one.model)
        connection.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, '', '', 'OK', '', 1.5, NULL, ?)",
            (*row, one.SerializeToString()),
        )
    connection.commit()
    connection.close()
    return path


async def test_a_file_of_version_1_keeps_every_record_in_order(old_file):
    store = SqliteStore(old_file)
    assert await numbers(store) == list(range(50, 0, -1))
    assert await numbers(store, model="m1") == list(range(49, 0, -2))
    assert len(await numbers(store, min_duration_ms=1.5)) == 50
    assert await numbers(store, min_duration_ms=1.6) == await numbers(store, min_ttft_ms=0.0) == []
    assert await stored(store, 7) == record(7)
    assert [one.record.record_id for one in await store.after(0, 100)] == [record_id(n) for n in range(1, 51)]
    await store.append([append_request(60, time_ns=2**61)])
    assert (await store.after(50, 10))[0].position == 51
    await store.close()
    # The migration runs once.
    store = SqliteStore(old_file)
    assert await numbers(store) == [60, *range(50, 0, -1)]
    await store.close()


async def test_a_file_of_version_1_remembers_how_far_its_sources_have_sent(old_file):
    store = SqliteStore(old_file)
    again = [AppendRequest(source=f"source-{n % 3}", sequence=n, record=record(n)) for n in range(1, 51)]
    for request in again:
        request.record.record_id = str(uuid.uuid4())
    assert await store.append(again) == []
    another = AppendRequest(source="source-0", sequence=1, record=record(70))
    assert await store.append([another]) == [another.record]
    await store.close()


async def test_a_migrated_file_of_version_1_gives_back_space(old_file):
    store = SqliteStore(old_file)
    await store.close()
    connection = sqlite3.connect(old_file)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "records_1" not in names
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def test_a_migrated_file_has_the_tables_of_a_new_one(old_file, tmp_path):
    def tables(path):
        connection = sqlite3.connect(path)
        rows = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        connection.close()
        return rows

    for path in (old_file, tmp_path / "new.sqlite3"):
        await SqliteStore(path).close()
    assert tables(old_file) == tables(tmp_path / "new.sqlite3")


async def test_a_file_of_version_2_keeps_the_space_of_each_client(tmp_path):
    path = tmp_path / "payloads.sqlite3"
    store = SqliteStore(path)
    await store.append([append_request(n, client=f"c{n % 2}", prompt="x" * 1000) for n in range(1, 21)])
    await store.close()
    connection = sqlite3.connect(path)
    before = connection.execute("SELECT * FROM shares ORDER BY client").fetchall()
    connection.executescript(
        "DROP TRIGGER share_more; DROP TRIGGER share_less; DROP TABLE shares; DROP INDEX records_refused;"
        "ALTER TABLE records DROP COLUMN refused; PRAGMA user_version = 2"
    )
    connection.commit()
    connection.close()
    store = SqliteStore(path)
    assert len(await numbers(store)) == 20
    assert await store.delete(client="c1") == 10
    await store.append([append_request(30, time_ns=2**61, client="c1", prompt="x" * 1000)])
    await store.close()
    connection = sqlite3.connect(path)
    after = connection.execute("SELECT * FROM shares ORDER BY client").fetchall()
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    connection.close()
    assert after[0] == before[0]
    assert after[1][2] == pytest.approx(before[1][2] / 10, rel=0.02)


async def test_a_migration_that_fails_leaves_the_file_as_it_was(old_file):
    connection = sqlite3.connect(old_file)
    connection.execute("CREATE TABLE sources (in_the_way INTEGER)")
    connection.commit()
    with pytest.raises(Exception, match="sources"):
        SqliteStore(old_file)
    assert connection.execute("SELECT count(*) FROM records").fetchone() == (50,)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.execute("DROP TABLE sources")
    connection.commit()
    connection.close()
    store = SqliteStore(old_file)
    assert len(await numbers(store)) == 50
    await store.close()


FILTERS = [
    {"model": "m"},
    {"status": "OK"},
    {"finish_reason": "stop"},
    {"request_id": "r"},
    {"trace_id": "t"},
    {"client": "c"},
    {"since": timestamp(5)},
    {"until": timestamp(5)},
    {"min_duration_ms": 1.0},
    {"min_ttft_ms": 1.0},
    {},
]


@pytest.mark.parametrize("before", [None, reading.Place(9, 9)], ids=["first page", "later page"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
async def test_a_page_of_every_filter_is_read_from_an_index_in_its_order(tmp_path, filters, before):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    plan = explained(tmp_path, reading.page_statement(Filters(QueryPayloadsRequest(**filters)), before, 100))
    inner = [line for line in plan if "INDEX records_by" in line]
    assert inner, plan
    assert not [line for line in plan if line.startswith("SCAN records") and "INDEX" not in line], plan
    # The page's hundred may be sorted again, never all that pass the filter.
    assert sum("TEMP B-TREE" in line for line in plan) <= 1, plan
    await store.close()


@pytest.mark.parametrize("filters", FILTERS[:6] + FILTERS[8:10], ids=str)
async def test_a_selective_filter_is_looked_up_in_an_index_of_its_own(tmp_path, filters):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    for statement in reading.lookups(Filters(QueryPayloadsRequest(**filters))):
        (line,) = explained(tmp_path, statement)
        assert line.startswith("SEARCH records USING COVERING INDEX records_by"), line
    await store.close()


def explained(folder, statement):
    """SQLite's query plan of a statement."""
    text = str(statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    engine = sql.create_engine(f"sqlite:///{folder / 'payloads.sqlite3'}")
    with engine.connect() as connection:
        lines = [row.detail for row in connection.execute(sql.text(f"EXPLAIN QUERY PLAN {text}"))]
    engine.dispose()
    return lines


@pytest.mark.parametrize("ms", [0.0, 1e-9, 0.001, 0.9, 1.0, 1.18, 1.2, 999.9, 1e12, 1e300, float("inf"), -1.0])
async def test_a_bound_on_durations_is_exact_however_they_are_indexed(tmp_path, ms):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    durations = [ms, math.nextafter(ms, math.inf), math.nextafter(ms, -math.inf), 2 * ms, ms / 2, 0.0]
    await store.append([append_request(n, duration_ms=d, ttft_ms=d) for n, d in enumerate(durations, 1)])
    expected = [n for n, d in enumerate(durations, 1) if d >= ms]
    assert sorted(await numbers(store, min_duration_ms=ms)) == expected
    assert sorted(await numbers(store, min_ttft_ms=ms)) == expected
    await store.close()


async def test_few_matches_among_many_records_are_found_with_any_other_filter(tmp_path):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    every = [
        append_request(
            n, model="m", status="INTERNAL" if n in (3, 4) else "OK", duration_ms=n, ttft_ms=1, time_ns=n * 1000
        )
        for n in range(1, 2 * reading.FEW + 2)
    ]
    await store.append(every)
    assert await numbers(store, model="m", status="INTERNAL") == [4, 3]
    assert await numbers(store, model="m", min_duration_ms=float(2 * reading.FEW)) == [
        2 * reading.FEW + 1,
        2 * reading.FEW,
    ]
    assert await numbers(store, limit=2, model="m", min_ttft_ms=1.0, until=timestamp(3000)) == [2, 1]
    await store.close()
