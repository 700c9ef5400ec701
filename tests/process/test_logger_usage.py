"""Usage counts each recorded request once, by client, model and time, even after the record is deleted."""

import math
from datetime import UTC, datetime

import pytest

from headrace.errors import DeadlineError, InvalidRequestError
from headrace_logger.retention import Retention
from headrace_logger.store import usage
from headrace_logger.store.store import Store
from headrace_logger.store.usage import UsageQuery
from headrace_protos.headrace_pb2 import PayloadRecord, Usage, UsageRequest
from tests.process.test_logger_store import LoggedCall, append_request, explained, record_id, timestamp
from tests.support.payload_fixtures import only_sqlite

DAY_NS = 86_400 * 10**9
HOUR_NS = 3600 * 10**9
START_NS = 20_000 * DAY_NS  # 2024-10-04.
ANN = (("x-headrace-client", "ann"), ("x-headrace-policy", "{}"))


def taken(number, at_ns=START_NS, tokens=(10, 4, 3), **fields):
    prompt, cached, completion = tokens
    own = {"client": "ann", "model": "m", "status": "OK", "duration_ms": 1500.0} | fields
    own["usage"] = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
    return append_request(number, time_ns=at_ns, **own)


async def groups(store, **fields):
    """The groups as plain values, without unset fields of the key."""
    response = await store.usage(UsageQuery.of(UsageRequest(**fields)))
    return [{field.name: value for field, value in group.ListFields()} for group in response.groups]


def sums(requests=0, failed=0, prompt=0, cached=0, completion=0, seconds=0.0, duration=None):
    return {
        "requests": requests,
        "failed_requests": failed,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "seconds": seconds,
        "duration_seconds": seconds if duration is None else duration,
    }


async def test_sums_are_per_client_and_model(store):
    await store.append(
        [
            taken(1),
            taken(2, tokens=(1, 0, 2), duration_ms=500),
            taken(3, model="n"),
            taken(4, client="bob", status="CANCELLED"),
            taken(5, client="bob", status="INTERNAL", tokens=(0, 0, 0)),
        ]
    )
    assert await groups(store) == [
        {"client": "ann", "model": "m"} | sums(2, 0, 11, 4, 5, 2.0),
        {"client": "ann", "model": "n"} | sums(1, 0, 10, 4, 3, 1.5),
        {"client": "bob", "model": "m"} | sums(2, 1, 10, 4, 3, 3.0),
    ]
    assert await groups(store, group="model", client="ann") == [
        {"model": "m"} | sums(2, 0, 11, 4, 5, 2.0),
        {"model": "n"} | sums(1, 0, 10, 4, 3, 1.5),
    ]
    assert await groups(store, group="", model="m") == [sums(4, 1, 21, 8, 8, 5.0)]
    assert await groups(store, group="", client="nobody") == [sums()]
    assert await groups(store, client="nobody") == []


async def test_the_engine_s_time_counts_if_it_is_known_and_otherwise_the_whole_duration(store):
    await store.append([taken(1, engine_ms=250.0), taken(2, engine_ms=0.0), taken(3), taken(4, engine_ms=math.nan)])
    assert await groups(store, group="") == [sums(4, 0, 40, 16, 12, 1.75, duration=6.0)]


async def test_periods_are_whole_hours_and_days_those_of_utc(store):
    times = {1: 0, 2: HOUR_NS - 1000, 3: HOUR_NS, 4: DAY_NS - 1000, 5: DAY_NS}
    await store.append([taken(n, START_NS + offset_ns) for n, offset_ns in times.items()])

    async def count(**fields):
        (group,) = await groups(store, group="", **fields)
        return group["requests"]

    assert await count(since=timestamp(START_NS + 1000)) == 5
    assert await count(since=timestamp(START_NS + HOUR_NS)) == 3
    assert await count(until=timestamp(START_NS + HOUR_NS)) == 2
    assert await count(until=timestamp(START_NS + HOUR_NS + 1)) == 3
    assert await count(until=timestamp(START_NS)) == 0
    far = timestamp(0)
    far.seconds = 2**62
    assert await count(until=far) == 5
    assert await count(since=far) == 0
    days = await groups(store, group="day, client")
    assert [(group["day"], group["client"], group["requests"]) for group in days] == [
        ("2024-10-04", "ann", 4),
        ("2024-10-05", "ann", 1),
    ]
    rounded = await store.usage(
        UsageQuery.of(UsageRequest(since=timestamp(START_NS + 1), until=timestamp(START_NS + 1)))
    )
    assert (rounded.since, rounded.until) == (timestamp(START_NS), timestamp(START_NS + HOUR_NS))


async def test_a_repeated_record_counts_once(store):
    await store.append([taken(1), taken(1)])
    await store.append([taken(1)])
    moved = taken(2)
    moved.record.record_id = record_id(1)
    await store.append([moved])
    assert await groups(store, group="") == [sums(1, 0, 10, 4, 3, 1.5)]


@pytest.mark.parametrize("order", ["call first", "record first"])
async def test_the_gateway_s_line_of_a_call_adds_nothing(store, order):
    call = PayloadRecord(record_id=record_id(99), client="ann", call_id="c", status="OK")
    call.time.FromNanoseconds(START_NS)
    record = taken(1, call_id="c")
    if order == "call first":
        await store.add_calls([LoggedCall(call, may_be_recorded=True)])
        assert await groups(store, group="") == [sums()]
        await store.append([record])
    else:
        await store.append([record])
        await store.add_calls([LoggedCall(call, may_be_recorded=True)])
    assert await groups(store, group="") == [sums(1, 0, 10, 4, 3, 1.5)]


@only_sqlite
async def test_neither_deletion_nor_retention_changes_the_usage(store, tmp_path):
    await store.append([taken(1), taken(2)])
    await store.delete(client="ann")
    await store.append([taken(3)])  # The deletion covers this record.
    await Retention(store, days=1, max_bytes=1 << 30).apply()
    assert await groups(store, group="") == [sums(3, 0, 30, 12, 9, 4.5)]
    await store.close()
    again = Store(tmp_path / "payloads.sqlite3")
    await again.append([taken(3), taken(4)])
    assert await groups(again, group="") == [sums(4, 0, 40, 16, 12, 6.0)]
    await again.close()


async def test_sums_are_deleted_at_their_own_age(store, monkeypatch):
    monkeypatch.setattr(usage, "_FORGOTTEN_AT_ONCE", 2)
    await store.append(
        [taken(n, START_NS + n * HOUR_NS, client=client) for n, client in enumerate(["ann", "bob", "cy"] * 4)][1:]
    )
    now_us = (START_NS + 30 * HOUR_NS) // 1000
    await Retention(store, days=0, max_bytes=1 << 30, now_us=lambda: now_us, usage_days=1).apply()
    kept = await groups(store, group="client")
    assert [(group["client"], group["requests"]) for group in kept] == [("ann", 2), ("bob", 2), ("cy", 2)]


@only_sqlite
async def test_unknown_models_add_no_rows(store, tmp_path):
    await store.append([taken(n, model=f"made up {n}", status="NOT_FOUND", tokens=(0, 0, 0)) for n in range(1, 50)])
    await store.append([taken(50), taken(51, status="NOT_FOUND")])
    assert [(group["model"], group["requests"]) for group in await groups(store)] == [("", 49), ("m", 2)]
    await store.close()
    again = Store(tmp_path / "payloads.sqlite3")
    await again.append([taken(52, status="RESOURCE_EXHAUSTED", tokens=(0, 0, 0))])
    assert [(group["model"], group["failed_requests"]) for group in await groups(again)] == [("", 49), ("m", 2)]
    await again.close()


async def test_nan_times_count_as_zero(store):
    durations = [float("nan"), float("inf"), -1.0, 1e300, 1000.0]
    await store.append([taken(n, duration_ms=duration_ms) for n, duration_ms in enumerate(durations, 1)])
    (group,) = await groups(store, group="")
    assert (group["requests"], group["seconds"]) == (5, 10**9 + 1)


@pytest.mark.parametrize("group", ["client,clients", "model,model", "hour", "client;DROP TABLE usage"])
async def test_unknown_groups_are_refused(payload_log, group):
    with pytest.raises(InvalidRequestError, match="client, model, day"):
        await payload_log.Usage(UsageRequest(group=group))


async def test_too_many_groups_are_refused_and_never_truncated(store, monkeypatch):
    monkeypatch.setattr(usage, "MAX_GROUPS", 3)
    await store.append([taken(n, client=f"c{n}") for n in range(1, 4)])
    assert len(await groups(store)) == 3
    await store.append([taken(4, client="c4")])
    with pytest.raises(InvalidRequestError, match="more than 3 groups"):
        await groups(store)
    assert await groups(store, group="") == [sums(4, 0, 40, 16, 12, 6.0)]


async def test_a_sum_that_takes_too_long_ends_and_the_connection_serves_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "_STEPS", 1)
    store = Store(tmp_path / "payloads.sqlite3", search_s=0)
    await store.append([taken(n, client=f"c{n}") for n in range(1, 50)])
    for _ in range(5):
        with pytest.raises(DeadlineError, match="choose a shorter period"):
            await groups(store)
    assert [one.position for one in await store.after(0, 100)] == list(range(1, 50))
    await store.close()


async def test_a_user_sees_its_own_usage_and_an_admin_everyone_s(store, payload_log):
    await store.append([taken(1), taken(2, client="bob")])
    admin = (("x-headrace-client", "root"), ("x-headrace-policy", '{"role": "admin"}'))
    for metadata, clients in ((ANN, ["ann"]), (admin, ["ann", "bob"]), ((), ["ann", "bob"])):
        response = await payload_log.Usage(UsageRequest(), metadata=metadata)
        assert [group.client for group in response.groups] == clients
    response = await payload_log.Usage(UsageRequest(group=""), metadata=ANN)
    assert [group.requests for group in response.groups] == [1]


async def test_an_admin_can_ask_for_its_own_usage(store, payload_log):
    await store.append([taken(1), taken(2, client="root"), taken(3, client="")])
    admin = (("x-headrace-client", "root"), ("x-headrace-policy", '{"role": "admin"}'))
    for metadata, client in ((ANN, "ann"), (admin, "root"), ((), "")):
        for fields in ({}, {"client": client}):
            response = await payload_log.Usage(UsageRequest(own=True, **fields), metadata=metadata)
            assert [(group.client, group.requests) for group in response.groups] == [(client, 1)]
    with pytest.raises(InvalidRequestError, match="different clients"):
        await payload_log.Usage(UsageRequest(own=True, client="ann"), metadata=admin)


@only_sqlite
async def test_a_client_s_month_is_one_range_of_the_key(store, tmp_path):
    await store.append([taken(1)])
    month = timestamp(int(datetime(2024, 10, 1, tzinfo=UTC).timestamp()) * 10**9)
    for fields in ({"client": "ann"}, {}):
        plan = explained(tmp_path, UsageQuery.of(UsageRequest(since=month, group="client", **fields)).statement())
        assert "SEARCH usage USING PRIMARY KEY (client=? AND hour>?)" in plan, plan
        assert not [line for line in plan if line.startswith("SCAN usage")], plan
