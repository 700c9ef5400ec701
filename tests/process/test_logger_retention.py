"""Records are deleted for good, by age, by size and by request; usage counts each once, also after its deletion."""

import logging
import math
import sqlite3
from datetime import UTC, datetime

import pytest

from headrace.errors import DeadlineError, InvalidRequestError
from headrace_logger.retention import Retention
from headrace_logger.store import usage
from headrace_logger.store.store import Store
from headrace_logger.store.usage import statement
from headrace_protos.headrace_pb2 import DeletePayloadsRequest, PayloadRecord, Usage, UsageRequest
from tests.support.payload_fixtures import only_sqlite
from tests.support.payload_records import LoggedCall, append_request, explained, numbers, record_id, timestamp

DAY_US = 24 * 3600 * 1_000_000
NOW_US = 20_000 * DAY_US
UNBOUNDED = 1 << 40
NEEDLE = "NEEDLE" * 5


@pytest.fixture
def path(tmp_path):
    return tmp_path / "payloads.sqlite3"


def aged(number, days, **fields):
    return append_request(number, time_ns=(NOW_US - int(days * DAY_US)) * 1000, **fields)


def at_now():
    return NOW_US


def bytes_of(path):
    return sum(file.stat().st_size for file in path.parent.iterdir() if not file.name.endswith("-shm"))


async def test_records_are_deleted_for_good_when_they_are_older_than_the_limit(store):
    old = [aged(n, days=10 - n) for n in range(1, 10)]
    await store.append(old)
    assert await Retention(store, 0, UNBOUNDED, now_us=at_now).apply() == 0  # They are kept for ever.
    retention = Retention(store, 7, UNBOUNDED, now_us=at_now)
    assert await retention.apply() == 2
    await store.append(old)
    assert await numbers(store) == [9, 8, 7, 6, 5, 4, 3]
    assert await retention.apply() == 0


@only_sqlite
async def test_above_the_size_the_oldest_are_deleted_and_the_file_shrinks(store, path):
    await store.append([aged(n, days=1 - n / 1e6, prompt="x" * 4000) for n in range(1, 1001)])
    size = bytes_of(path)
    limit = 2 << 20
    assert size > limit
    deleted = await Retention(store, 7, limit, now_us=at_now).apply()
    left = await numbers(store)
    assert left == list(range(1000, deleted, -1))
    assert limit * 0.9 < bytes_of(path) <= limit
    assert await Retention(store, 7, limit, now_us=at_now).apply() == 0


async def test_a_large_record_displaces_only_as_many_as_needed(store):
    await store.append([aged(1, days=3, prompt="x" * (4 << 20)), aged(2, days=2), aged(3, days=1)])
    assert await Retention(store, 7, 2 << 20, now_us=at_now).apply() == 1
    assert await numbers(store) == [3, 2]


async def test_refused_requests_displace_no_answered_ones(store):
    limit = 8 << 20
    answered = [aged(n, days=6, status="OK", prompt="x" * 4000, text="y") for n in range(1, 501)]
    await store.append(answered)
    refused = [
        aged(n, days=1 - n / 1e6, status="RESOURCE_EXHAUSTED", client="flood", prompt="x" * 2000)
        for n in range(1000, 5000)
    ]
    await store.append(refused)
    deleted = await Retention(store, 7, limit, now_us=at_now).apply()
    left = await numbers(store, limit=10_000)
    assert set(range(1, 501)) <= set(left)
    assert 0 < deleted < 4000
    assert left[0] == 4999, "the newest refused record stays"
    assert not set(range(1000, 1000 + deleted)) & set(left)


async def test_the_client_with_the_most_bytes_loses_its_oldest_records(store):
    limit = 4 << 20
    await store.append([aged(n, days=6, status="OK", client="quiet", prompt="x" * 4000) for n in range(1, 101)])
    await store.append([aged(n, days=1 - n / 1e6, client="loud", prompt="x" * 4000) for n in range(1000, 2500)])
    deleted = await Retention(store, 7, limit, now_us=at_now).apply()
    left = await numbers(store, limit=10_000)
    assert left == [*range(2499, 999 + deleted, -1), *range(100, 0, -1)]


@only_sqlite
async def test_a_partly_answered_request_does_not_count_as_refused(store, path):
    await store.append(
        [
            aged(1, days=1, status="CANCELLED", client="c", text="half"),
            aged(2, days=1, status="CANCELLED", client="c"),
            aged(3, days=1, status="OK", client="c"),
            aged(4, days=1, status="INTERNAL", client="c"),
            aged(5, days=1, status="INVALID_ARGUMENT", client="c"),
        ]
    )
    connection = sqlite3.connect(path)
    refused = connection.execute("SELECT record_id FROM records WHERE refused ORDER BY position").fetchall()
    taken = connection.execute("SELECT client, refused, bytes > 0 FROM shares ORDER BY refused").fetchall()
    connection.close()
    assert refused == [(record_id(2),), (record_id(5),)]
    assert taken == [("c", 0, 1), ("c", 1, 1)]
    assert await store.delete(client="c") == 5
    await store.forget(0)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM shares").fetchone() == (0,)
    connection.close()


async def test_appends_run_between_two_steps_of_a_deletion(store):
    """A step is bounded, so that no append waits for the whole deletion."""
    await store.append([aged(n, days=8) for n in range(1, 1001)])
    steps = []
    while positions := await store.expire(NOW_US, None):
        steps.append(len(positions))
    assert sum(steps) == 1000
    assert max(steps) <= 200


async def test_deleted_records_that_a_sink_had_not_received_are_logged(store, caplog):
    await store.append([aged(n, days=8) for n in range(1, 11)])
    await store.move_cursor("slow", 4)
    await store.move_cursor("quick", 9)
    await store.move_cursor("no longer configured", 1)
    with caplog.at_level(logging.INFO, logger="headrace_logger.retention"):
        await Retention(store, 7, UNBOUNDED, sinks=("slow", "quick", "new"), now_us=at_now).apply()
    assert "10 records were deleted" in caplog.text
    assert "6 deleted records were not confirmed by every sink" in caplog.text


@only_sqlite
async def test_received_sequences_are_forgotten_long_after_they_can_be_repeated(store, path):
    def remembered():
        connection = sqlite3.connect(path)
        (count,) = connection.execute(
            "SELECT (SELECT count(*) FROM appended) + (SELECT count(*) FROM sources)"
        ).fetchone()
        connection.close()
        return count

    await store.append([append_request(n) for n in range(1, 11)])
    assert remembered() == 11
    # The store has the real clock; retention's is set forward by so many days.
    connection = sqlite3.connect(path)
    (arrived_us,) = connection.execute("SELECT max(time_us) FROM appended").fetchone()
    connection.close()
    await Retention(store, 0, UNBOUNDED, now_us=lambda: arrived_us + 29 * DAY_US).apply()
    assert remembered() == 11
    await Retention(store, 40, UNBOUNDED, now_us=lambda: arrived_us + 39 * DAY_US).apply()
    assert remembered() == 11
    await Retention(store, 0, UNBOUNDED, now_us=lambda: arrived_us + 31 * DAY_US).apply()
    assert remembered() == 0


async def test_delete_takes_every_record_of_the_key_and_no_other(store):
    await store.append([append_request(n, request_id=f"r{n % 2}", client=f"c{n % 3}") for n in range(1, 13)])
    assert await store.delete(record_id=record_id(12)) == 1
    assert await store.delete(record_id=record_id(12)) == 0
    assert await store.delete(request_id="r1") == 6
    assert await store.delete(client="c1") == 2
    assert await store.delete(client="nobody") == 0
    assert await numbers(store) == [8, 6, 2]
    assert await numbers(store, client="c2") == [8, 2]


@pytest.mark.parametrize("key", ["record_id", "request_id", "client"])
async def test_a_record_that_is_deleted_before_it_arrives_is_dropped_on_arrival(path, key):
    def late(number, **fields):
        return aged(number, days=1, **{"request_id": f"r{number}", "client": f"c{number}"} | fields)

    value = {"record_id": record_id(1), "request_id": "r1", "client": "c1"}[key]
    store = Store(path)
    assert await store.delete(**{key: value}) == 0
    await store.close()
    store = Store(path)
    appends = []
    store.on_append(lambda: appends.append(True))
    await store.append([late(1, call_id="a")])
    assert await numbers(store) == []
    await store.append([late(1, call_id="a"), late(2)])
    assert await numbers(store) == [2]
    assert len(appends) == 1
    # Records of later requests with the same key are not dropped, except one with the same record id.
    after = append_request(3, time_ns=2**62, request_id="r1", client="c1")
    await store.append([after])
    assert await numbers(store) == [3, 2]
    # The gateway's line of the call is dropped, as for any deleted record.
    call = PayloadRecord(record_id=record_id(9), call_id="a")
    call.gateway.path = "/p"
    await store.add_calls([LoggedCall(call)])
    assert await numbers(store) == [3, 2]
    await store.close()


@only_sqlite
async def test_a_deletion_takes_little_space_for_any_length_of_its_key(store, path):
    await store.delete(client="c" * 1_000_000)
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT max(length(value)) FROM deletions").fetchone()[0] <= 64
    await store.append([aged(1, days=1, client="c" * 1_000_000), aged(2, days=1, client="c" * 999_999)])
    assert await numbers(store) == [2]


@only_sqlite
async def test_deletions_are_forgotten_when_no_late_record_can_arrive(store, path):
    await store.delete(client="c")
    await store.forget(2**62)
    await store.append([aged(1, days=1, client="c")])
    assert await numbers(store) == [1]


@only_sqlite
async def test_deleted_records_are_in_no_file(store, path):
    for n in range(1, 4):
        await store.append([append_request(n, request_id=f"r{n}", prompt=NEEDLE * n * 300)])
    assert any(NEEDLE.encode() in file.read_bytes() for file in path.parent.iterdir())
    for n in range(1, 4):
        await store.delete(request_id=f"r{n}")
    assert not any(NEEDLE.encode() in file.read_bytes() for file in path.parent.iterdir())


@only_sqlite
async def test_deleted_records_that_a_reader_keeps_in_the_log_are_gone_after_the_next_round(store, path):
    await store.append([append_request(1, prompt=NEEDLE)])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM records").fetchone()
    assert await store.delete(record_id=record_id(1)) == 1
    reader.execute("ROLLBACK")
    reader.close()
    await Retention(store, 7, UNBOUNDED, now_us=at_now).apply()
    assert not any(NEEDLE.encode() in file.read_bytes() for file in path.parent.iterdir())


async def test_a_cursor_survives_a_restart_and_positions_are_never_given_twice(path):
    store = Store(path)
    assert ((await store.cursors()).get("a", 0), await store.last_position(), await store.cursors()) == (0, 0, {})
    await store.append([append_request(n) for n in range(1, 4)])
    await store.move_cursor("a", 2)
    await store.move_cursor("a", 3)
    assert await store.delete(record_id=record_id(3)) == 1
    await store.close()
    store = Store(path)
    assert ((await store.cursors()).get("a", 0), await store.last_position()) == (3, 3)
    await store.append([append_request(4)])
    assert [one.position for one in await store.after(3, 10)] == [4]
    assert [one.position for one in await store.after(0, 2)] == [1, 2]
    await store.close()


async def test_delete_without_a_key_deletes_nothing(store, payload_log):
    await store.append([append_request(1)])
    for key in ({}, {"record_id": ""}, {"request_id": ""}, {"client": ""}):
        with pytest.raises(InvalidRequestError, match="give a record_id, a request_id or a client"):
            await payload_log.Delete(DeletePayloadsRequest(**key))
    assert await numbers(store) == [1]


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
    response = await store.usage(UsageRequest(**fields))
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
    rounded = await store.usage(UsageRequest(since=timestamp(START_NS + 1), until=timestamp(START_NS + 1)))
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


async def test_unknown_groups_are_refused(payload_log):
    for group in ("client,clients", "model,model", "hour", "client;DROP TABLE usage"):
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
        plan = explained(tmp_path, statement(UsageRequest(since=month, group="client", **fields)))
        assert "SEARCH usage USING PRIMARY KEY (client=? AND hour>?)" in plan, plan
        assert not [line for line in plan if line.startswith("SCAN usage")], plan
