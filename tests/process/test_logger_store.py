"""The payload store: idempotent, private, filtered by indexes and paged newest first, never blocking the event loop."""

import asyncio
import math
import shutil
import sqlite3
import stat
import uuid

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.errors import DeadlineError, InvalidRequestError, NotFoundError, NotReadyError, StartupError
from headrace_logger.store import reading, sqlite
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_logger.store.tables import SCHEMA_VERSION
from headrace_protos.headrace_pb2 import GetPayloadRequest, QueryPayloadsRequest
from tests.support.payload_fixtures import only_sqlite
from tests.support.payload_records import RECORDS, append_request, explained, numbers, record_id, timestamp
from tests.support.small_disk import small_disk


async def test_the_same_sequence_of_another_source_is_another_record(store):
    other = append_request(1, source="other")
    other.record.record_id = record_id(50)
    await store.append([append_request(1), other])
    assert await numbers(store) == [50, 1]


async def test_requests_during_a_commit_are_committed_together(store):
    first, notifications = store.append([append_request(1)]), []
    store.on_append(lambda: notifications.append(True))
    others = [store.append([append_request(n, source=str(n)), append_request(n + 100)]) for n in range(2, 52)]
    repeats = [store.append([append_request(n + 100)]) for n in range(2, 52)]
    await asyncio.gather(first, *others, *repeats)
    assert sorted(await numbers(store)) == [1, *range(2, 52), *range(102, 152)]
    assert len(notifications) <= 2


async def test_a_cancelled_caller_affects_no_other_s_records(store):
    leaving, staying = (asyncio.ensure_future(store.append([append_request(n)])) for n in (1, 2))
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    assert await numbers(store) == [2, 1]


FILTERED = (
    ({}, [4, 3, 2, 1]),
    ({"model": "a"}, [3, 1]),
    ({"model": "none such"}, []),
    ({"status": "INTERNAL"}, [2]),
    ({"finish_reason": "length"}, [3]),
    ({"finish_reason": ""}, [4, 2]),
    ({"request_id": "same"}, [4, 2]),
    ({"trace_id": "t3"}, [3]),
    ({"min_duration_ms": 20.0}, [4, 3, 2]),
    ({"min_ttft_ms": 2.0}, [3, 2]),
    ({"text_contains": "needle"}, [4, 1]),
    ({"text_contains": "ß"}, [3]),
    ({"since": timestamp(2_000_000)}, [4, 3, 2]),
    ({"since": timestamp(2_000_001)}, [4, 3]),
    ({"until": timestamp(2_000_000)}, [1]),
    ({"until": timestamp(2_000_001)}, [2, 1]),
    ({"since": timestamp(2_000_000), "until": timestamp(4_000_000)}, [3, 2]),
    ({"since": Timestamp(seconds=2**62)}, []),
    ({"until": Timestamp(seconds=2**62)}, [4, 3, 2, 1]),
    ({"model": "b", "request_id": "same", "text_contains": "needle", "min_duration_ms": 1.0}, [4]),
    ({"model": "a", "status": "INTERNAL"}, []),
)


async def test_every_filter_narrows_and_all_are_combined(store):
    await store.append([append_request(n, time_ns=n * 1_000_000, **fields) for n, fields in RECORDS.items()])
    for filters, expected in FILTERED:
        assert await numbers(store, **filters) == expected, filters


async def test_the_pages_are_complete_although_records_arrive_meanwhile(store, payload_log):
    await store.append([append_request(n) for n in range(1, 251)])
    found, token = [], None
    while page := [r async for r in payload_log.Query(QueryPayloadsRequest(page_size=40, page_token=token))]:
        assert len(page) == 40 or found
        found += [uuid.UUID(record.record_id).int for record in page]
        token = page[-1].page_token
        await store.append([append_request(1000 + len(found))])
    assert found == list(range(250, 0, -1))


async def test_page_size_is_100_by_default_and_1000_at_most(store, payload_log):
    await store.append([append_request(n) for n in range(1, 1002)])
    assert len([r async for r in payload_log.Query(QueryPayloadsRequest())]) == 100
    assert len([r async for r in payload_log.Query(QueryPayloadsRequest(page_size=0))]) == 100
    assert len([r async for r in payload_log.Query(QueryPayloadsRequest(page_size=1000))]) == 1000
    with pytest.raises(InvalidRequestError, match="page_size 1001 is above 1000"):
        await anext(aiter(payload_log.Query(QueryPayloadsRequest(page_size=1001))))


async def test_a_malformed_page_token_is_refused(payload_log):
    for token in ("x", "é", "!!!!", "AAAA", "A" * 23, "A" * 400, " ", "AZ" * 11):  # The last: of another version.
        with pytest.raises(InvalidRequestError, match="page_token"):
            await anext(aiter(payload_log.Query(QueryPayloadsRequest(page_token=token))))


async def test_get_finds_by_key_and_the_newest_by_request_id(store, payload_log):
    await store.append([append_request(n, request_id="r", model=f"m{n}") for n in (1, 2)])
    assert (await payload_log.Get(GetPayloadRequest(record_id=record_id(1)))).model == "m1"
    assert (await payload_log.Get(GetPayloadRequest(request_id="r"))).model == "m2"
    for key in ({"record_id": record_id(3)}, {"record_id": "no uuid"}, {"request_id": "none"}):
        with pytest.raises(NotFoundError, match=next(iter(key.values()))):
            await payload_log.Get(GetPayloadRequest(**key))
    with pytest.raises(InvalidRequestError, match="record_id or a request_id"):
        await payload_log.Get(GetPayloadRequest())


async def test_only_the_owner_may_read_the_files(tmp_path):
    path = tmp_path / "made" / "payloads.sqlite3"
    store = Store(path)
    await store.append([append_request(1)])
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    await store.close()
    assert modes == {f"payloads.sqlite3{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    await Store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_newer_schema_is_refused_in_one_line(tmp_path):
    path = tmp_path / "payloads.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE schema_version AS SELECT {SCHEMA_VERSION + 1} AS version")
    connection.close()
    with pytest.raises(
        StartupError, match=f"schema version {SCHEMA_VERSION + 1}, this logger knows {SCHEMA_VERSION}"
    ) as caught:
        Store(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to have a header" * 10)
    with pytest.raises(StartupError, match=r"text: file is not a database"):
        Store(text)
    with pytest.raises(StartupError, match="Is a directory"):
        Store(tmp_path)
    with pytest.raises(StartupError, match=r"Not a directory|File exists"):
        Store(text / "payloads.sqlite3")


@only_sqlite
async def test_writing_waits_outside_the_event_loop_and_reading_does_not_wait(store, tmp_path):
    await store.append([append_request(1)])
    other = sqlite3.connect(tmp_path / "payloads.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(store.append([append_request(2)]))
    assert await numbers(store) == [1]
    assert not writing.done()
    other.execute("ROLLBACK")
    other.close()
    await writing
    assert await numbers(store) == [2, 1]


async def test_an_unread_query_holds_no_transaction(store, tmp_path):
    await store.append([append_request(n) for n in range(1, 301)])
    query = store.query(Filters(QueryPayloadsRequest()), None, 300)
    await anext(query)
    await store.append([append_request(301)])
    with sqlite3.connect(tmp_path / "payloads.sqlite3") as connection:
        # A checkpoint that empties the log succeeds only if no reader is in a transaction.
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.close()
    assert busy == 0
    await query.aclose()


async def test_readers_see_every_committed_record_while_others_are_written(store):
    committed = 0

    async def write():
        nonlocal committed
        for batch in range(20):
            await store.append([append_request(batch * 25 + n) for n in range(1, 26)])
            committed = (batch + 1) * 25

    async def read(until):
        while committed < until:
            before = committed
            found = await numbers(store)
            assert found == list(range(len(found), 0, -1))
            assert len(found) >= before

    await asyncio.gather(write(), *(read(500) for _ in range(3)))


@only_sqlite
async def test_a_failing_database_is_reported_as_not_ready(store, tmp_path):
    with sqlite3.connect(tmp_path / "payloads.sqlite3") as connection:
        connection.execute("ALTER TABLE records RENAME TO gone")
    connection.close()
    for work in (store.check(), store.append([append_request(1)])):
        with pytest.raises(NotReadyError, match="the payload store does not answer"):
            await work


async def test_the_check_commits_so_that_a_full_disk_fails_it_and_room_makes_it_pass_again(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        store = Store(disk.path / "payloads.sqlite3")
        await store.append([append_request(1)])
        await store.check()
        disk.fill()
        with pytest.raises(NotReadyError):
            await store.append([append_request(number, prompt="x" * 10_000) for number in range(2, 1000)])
        with pytest.raises(NotReadyError):
            await store.check()
        await store.check_reading()
        disk.empty()
        await store.append([append_request(1001)])
        await store.check()
        await store.close()


async def test_a_text_search_that_takes_too_long_returns_a_token_to_continue(tmp_path):
    store = Store(tmp_path / "payloads.sqlite3", search_s=0.0)
    await store.append([append_request(n, prompt="needle" if n in (5, 250, 300) else "hay") for n in range(1, 401)])
    filters, found, token = Filters(QueryPayloadsRequest(text_contains="needle")), [], None

    async def search():
        async for one in store.query(filters, token, 100):
            found.append(uuid.UUID(one.record.record_id).int)

    for _ in range(4):
        with pytest.raises(DeadlineError, match="100 records were searched") as caught:
            await search()
        token = caught.value.message.rpartition("page_token=")[2]
    await search()
    assert found == [300, 250, 5]
    # Without a text nothing is searched.
    assert len(await numbers(store)) == 400
    await store.close()


@only_sqlite
@pytest.mark.parametrize("removed", ["", "-wal"])
async def test_a_removed_database_is_created_again_and_nothing_in_it_is_acknowledged(store, tmp_path, removed, caplog):
    path = tmp_path / "payloads.sqlite3"
    await store.append([append_request(n) for n in range(1, 4)])
    (tmp_path / f"payloads.sqlite3{removed}").unlink()
    with pytest.raises(NotReadyError, match="has been re-created"):
        await store.append([append_request(4)])
    assert "was removed" in caplog.text
    await store.append([append_request(4), append_request(5)])
    assert (await numbers(store))[:2] == [5, 4]
    assert [one.position for one in await store.after(3, 10)][-1] == await store.last_position() > 4
    await store.check()
    await store.close()
    again = Store(path)
    assert (await numbers(again))[:2] == [5, 4]
    await again.close()


@only_sqlite
async def test_a_removed_database_is_created_again_as_soon_as_that_is_possible(store, tmp_path, monkeypatch):
    await store.append([append_request(n) for n in range(1, 4)])

    def full(path, fsync):
        raise StartupError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "prepare", full)
        (tmp_path / "payloads.sqlite3").unlink()
        for _ in range(2):
            with pytest.raises(NotReadyError, match="no space left"):
                await store.check()
    with pytest.raises(NotReadyError, match="has been re-created"):
        await store.check()
    await store.append([append_request(4)])
    assert await store.last_position() > 3
    assert await numbers(store) == [4]


async def test_a_removed_folder_is_noticed_before_anything_is_written(tmp_path):
    store = Store(tmp_path / "run" / "payloads.sqlite3")
    await store.append([append_request(1)])
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(NotReadyError):
        await store.check()
    await store.check()
    await store.append([append_request(2)])
    assert await numbers(store) == [2]
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


@only_sqlite
@pytest.mark.parametrize("before", [None, reading.Place(9, 9)], ids=["first page", "later page"])
async def test_a_page_of_every_filter_is_read_from_an_index_in_its_order(store, tmp_path, before):
    for filters in FILTERS:
        plan = explained(tmp_path, reading.page_statement(Filters(QueryPayloadsRequest(**filters)), before, 100))
        inner = [line for line in plan if "INDEX records_by" in line]
        assert inner, plan
        assert not [line for line in plan if line.startswith("SCAN records") and "INDEX" not in line], plan
        # The page's hundred may be sorted again, never all that pass the filter.
        assert sum("TEMP B-TREE" in line for line in plan) <= 1, plan


@only_sqlite
async def test_a_selective_filter_is_looked_up_in_an_index_of_its_own(store, tmp_path):
    for filters in FILTERS[:6] + FILTERS[8:10]:
        for statement in reading.lookups(Filters(QueryPayloadsRequest(**filters))):
            (line,) = explained(tmp_path, statement)
            assert line.startswith("SEARCH records USING COVERING INDEX records_by"), line


async def test_a_bound_on_durations_is_exact_however_they_are_indexed(store):
    bounds = [0.0, 1e-9, 0.001, 0.9, 1.0, 1.18, 1.2, 999.9, 1e12, 1e300, float("inf"), -1.0]
    around = [(ms, math.nextafter(ms, math.inf), math.nextafter(ms, -math.inf), 2 * ms, ms / 2) for ms in bounds]
    durations = [duration for each in around for duration in each]
    await store.append([append_request(n, duration_ms=d, ttft_ms=d) for n, d in enumerate(durations, 1)])
    for ms in bounds:
        expected = [n for n, d in enumerate(durations, 1) if d >= ms]
        assert sorted(await numbers(store, min_duration_ms=ms)) == expected, ms
        assert sorted(await numbers(store, min_ttft_ms=ms)) == expected, ms


async def test_few_matches_among_many_records_are_found_with_any_other_filter(store):
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
