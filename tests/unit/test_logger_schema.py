"""Queries use an index."""

import math

import pytest

from headrace_logger.store import reading
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import QueryPayloadsRequest
from tests.process.test_logger_store import append_request, explained, numbers, timestamp

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
    store = Store(tmp_path / "payloads.sqlite3")
    plan = explained(tmp_path, reading.page_statement(Filters(QueryPayloadsRequest(**filters)), before, 100))
    inner = [line for line in plan if "INDEX records_by" in line]
    assert inner, plan
    assert not [line for line in plan if line.startswith("SCAN records") and "INDEX" not in line], plan
    # The page's hundred may be sorted again, never all that pass the filter.
    assert sum("TEMP B-TREE" in line for line in plan) <= 1, plan
    await store.close()


@pytest.mark.parametrize("filters", FILTERS[:6] + FILTERS[8:10], ids=str)
async def test_a_selective_filter_is_looked_up_in_an_index_of_its_own(tmp_path, filters):
    store = Store(tmp_path / "payloads.sqlite3")
    for statement in reading.lookups(Filters(QueryPayloadsRequest(**filters))):
        (line,) = explained(tmp_path, statement)
        assert line.startswith("SEARCH records USING COVERING INDEX records_by"), line
    await store.close()


@pytest.mark.parametrize("ms", [0.0, 1e-9, 0.001, 0.9, 1.0, 1.18, 1.2, 999.9, 1e12, 1e300, float("inf"), -1.0])
async def test_a_bound_on_durations_is_exact_however_they_are_indexed(tmp_path, ms):
    store = Store(tmp_path / "payloads.sqlite3")
    durations = [ms, math.nextafter(ms, math.inf), math.nextafter(ms, -math.inf), 2 * ms, ms / 2, 0.0]
    await store.append([append_request(n, duration_ms=d, ttft_ms=d) for n, d in enumerate(durations, 1)])
    expected = [n for n, d in enumerate(durations, 1) if d >= ms]
    assert sorted(await numbers(store, min_duration_ms=ms)) == expected
    assert sorted(await numbers(store, min_ttft_ms=ms)) == expected
    await store.close()


async def test_few_matches_among_many_records_are_found_with_any_other_filter(tmp_path):
    store = Store(tmp_path / "payloads.sqlite3")
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
