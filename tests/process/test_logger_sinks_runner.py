"""A sink gets every record's events at least once and in order, through all its failures, and delays only itself."""

import asyncio
import logging
import uuid
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from headrace.errors import NotReadyError
from headrace_logger.sinks import runner as runner_module
from headrace_logger.sinks.cloud_events import CloudEventsSink
from headrace_logger.sinks.delivery import Event, RefusedError, TryAgainError
from headrace_logger.sinks.runner import SinkRunner
from headrace_logger.store import reading
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord
from tests.process.sink_server import ACCEPTED, SinkServer
from tests.waiting import until

SOURCE = str(uuid.uuid4())


def record_id(number):
    return str(uuid.UUID(int=number))


def append_request(number, **fields):
    record = PayloadRecord(record_id=record_id(number), **({"status": "OK", "prompt": "p", "text": "t"} | fields))
    return AppendRequest(source=SOURCE, sequence=number, record=record)


async def append(store, numbers):
    await store.append([append_request(number) for number in numbers])


def pairs(numbers):
    """The keys of both events of each record, in order."""
    return [(f"/headrace/{part}", record_id(number)) for number in numbers for part in ("request", "response")]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(runner_module, "_MIN_DELAY_S", 0.005)
    monkeypatch.setattr(runner_module, "_MAX_DELAY_S", 0.02)
    monkeypatch.setattr(runner_module, "_STORE_DELAY_S", 0.005)
    monkeypatch.setattr(runner_module, "_SAVE_EVERY_S", 0.005)
    monkeypatch.setattr(runner_module, "_RESTART_DELAY_S", 0.005)


@pytest.fixture
async def server():
    server = SinkServer()
    await server.start()
    yield server
    await server.kill()


def cloud_events(url, timeout_s=20.0, connections=4):
    return CloudEventsSink(url, source="/headrace", namespace="default", timeout_s=timeout_s, connections=connections)


@asynccontextmanager
async def running(store, sink, concurrency=4, from_beginning=True):
    runner = SinkRunner(sink, store, concurrency=concurrency, from_beginning=from_beginning)
    await runner.start()
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await runner.close()
    assert task.cancelled()


async def cursor_is(store, url, position):
    return (await store.cursors()).get(url) == position


async def test_events_are_sent_in_the_order_of_commits(store, server):
    await append(store, [3, 1, 2])
    async with running(store, cloud_events(server.url), concurrency=1) as runner:
        await append(store, range(4, 200))
        await until(lambda: len(server.taken) == 398)
        await until(lambda: cursor_is(store, server.url, 199))
    assert server.keys == pairs([3, 1, 2, *range(4, 200)])
    assert runner.counts == {"delivered": 398}


async def test_several_records_are_in_flight_each_with_the_requests_event_before_the_answers(store, server):
    everyone_is_here = asyncio.Event()

    async def answer(event):
        if server.at_once == 4:
            everyone_is_here.set()
        await everyone_is_here.wait()
        return ACCEPTED

    server.answer = answer
    await append(store, range(1, 301))
    async with running(store, cloud_events(server.url), concurrency=4):
        await until(lambda: len(server.taken) == 600)
        await until(lambda: cursor_is(store, server.url, 300))
    assert sorted(server.keys) == sorted(pairs(range(1, 301)))
    assert server.at_once == 4
    first = {key: place for place, key in reversed(list(enumerate(server.keys)))}
    assert all(
        first[request] < first[answer] for request, answer in zip(*[iter(pairs(range(1, 301)))] * 2, strict=True)
    )


async def test_a_sink_that_dies_and_returns_gets_every_event(store, server, caplog):
    caplog.set_level(logging.INFO)
    async with running(store, cloud_events(server.url)) as runner:
        await append(store, range(1, 51))
        await until(lambda: len(server.taken) >= 10)
        await server.kill()
        await append(store, range(51, 101))
        await until(lambda: runner.counts["retried"] >= 8)
        await server.start()
        await until(lambda: cursor_is(store, server.url, 100))
    # An event whose answer was cut off arrives twice, under the same key.
    assert set(server.keys) == set(pairs(range(1, 101)))
    messages = [entry.getMessage() for entry in caplog.records if entry.name == runner_module.__name__]
    assert sum("accepts no events" in message for message in messages) == 1
    assert sum("accepts events again" in message for message in messages) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 301])
async def test_an_event_that_is_not_accepted_now_is_repeated_unchanged(store, server, status):
    tries = Counter()

    async def answer(event):
        key = (event.get_source(), event.get_id())
        tries[key] += 1
        return ACCEPTED if tries[key] == 3 else (status, {})

    server.answer = answer
    await append(store, [1, 2])
    async with running(store, cloud_events(server.url)) as runner:
        await until(lambda: cursor_is(store, server.url, 2))
    assert tries == dict.fromkeys(pairs([1, 2]), 3)
    assert runner.counts == {"delivered": 4, "retried": 8}


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
async def test_a_refused_event_is_logged_once_and_skipped(store, server, status, caplog):
    async def answer(event):
        refused = event.get_id() == record_id(2) and event.get_source() == "/headrace/request"
        return (status, {}) if refused else ACCEPTED

    server.answer = answer
    await append(store, [1, 2, 3])
    async with running(store, cloud_events(server.url), concurrency=1) as runner:
        await until(lambda: cursor_is(store, server.url, 3))
    assert server.keys == [key for key in pairs([1, 2, 3]) if key != ("/headrace/request", record_id(2))]
    assert runner.counts == {"delivered": 5, "refused": 1}
    (entry,) = [entry for entry in caplog.records if record_id(2) in entry.getMessage()]
    assert entry.getMessage().endswith(f"it answered {status}")


async def test_an_event_without_an_answer_in_time_is_repeated(store, server):
    async def answer(event):
        if server.tries == 1:
            await asyncio.Event().wait()
        return ACCEPTED

    server.answer = answer
    await append(store, [1])
    async with running(store, cloud_events(server.url, timeout_s=0.2)) as runner:
        await until(lambda: cursor_is(store, server.url, 1))
    assert server.keys == pairs([1])
    assert runner.counts["retried"] >= 1


async def test_a_connection_without_an_answer_leaves_room_for_the_next(store, server):
    hanging = 20

    async def answer(event):
        if server.tries <= hanging:
            await asyncio.Event().wait()
        return ACCEPTED

    server.answer = answer
    await append(store, range(1, 5))
    async with running(store, cloud_events(server.url, timeout_s=0.05, connections=2), concurrency=2):
        await until(lambda: cursor_is(store, server.url, 4))
    assert set(server.keys) == set(pairs(range(1, 5)))


async def test_an_endless_answer_is_not_read_to_its_end(store, server):
    server.body = b"x" * 10_000_000
    await append(store, [1, 2])
    async with running(store, cloud_events(server.url)):
        await until(lambda: cursor_is(store, server.url, 2))
    assert sorted(server.keys) == sorted(pairs([1, 2]))


class WatchedStore:
    """A store that records its reads."""

    def __init__(self, store):
        self._store = store
        self.read_after = []

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def after(self, position, limit):
        self.read_after.append(position)
        return await self._store.after(position, limit)


async def test_a_hanging_sink_delays_neither_the_log_nor_another_sink_and_reads_no_further(store, server):
    hanging = SinkServer()
    await hanging.start()
    hanging.answer = lambda event: asyncio.Event().wait()
    watched = WatchedStore(store)
    async with running(store, cloud_events(server.url)), running(watched, cloud_events(hanging.url)) as stuck:
        for first in range(1, 501, 50):
            await append(store, range(first, first + 50))
        await until(lambda: cursor_is(store, server.url, 500))
        await until(lambda: hanging.at_once == 4)
        assert stuck.counts == {}
        # Unsent records are in the store, not in memory: only one page was read.
        assert set(watched.read_after) == {0}
    assert sorted(server.keys) == sorted(pairs(range(1, 501)))
    assert await cursor_is(store, hanging.url, 0)
    await hanging.kill()


async def test_a_restart_continues_and_repeats_at_most_the_events_in_flight(tmp_path, server):
    async def answer(event):
        if event.get_id() == record_id(60):
            await asyncio.Event().wait()
        return ACCEPTED

    server.answer = answer
    path = tmp_path / "payloads.sqlite3"
    store = Store(path)
    await append(store, range(1, 101))
    async with running(store, cloud_events(server.url)):
        # All but the hanging event, at which the cursor stops.
        await until(lambda: len(server.taken) == 198)
        await until(lambda: cursor_is(store, server.url, 59))
    await store.close()

    server.answer = lambda event: asyncio.sleep(0, ACCEPTED)
    store = Store(path)
    async with running(store, cloud_events(server.url)):
        await until(lambda: cursor_is(store, server.url, 100))
    await store.close()
    assert Counter(server.keys) == Counter(pairs(range(1, 101))) + Counter(pairs(range(61, 101)))


async def test_a_stop_remembers_the_last_event(store, server, monkeypatch):
    monkeypatch.setattr(runner_module, "_SAVE_EVERY_S", 3600)
    async with running(store, cloud_events(server.url)) as runner:
        await append(store, [1])
        await until(lambda: cursor_is(store, server.url, 1))
        await append(store, [2, 3])
        await until(lambda: runner.counts["delivered"] == 6)
        await until(lambda: runner._finished == 3)
    assert await cursor_is(store, server.url, 3)


async def test_a_new_sink_begins_now_or_at_the_beginning(store, server):
    await append(store, [1, 2])
    other = SinkServer()
    await other.start()
    async with (
        running(store, cloud_events(server.url), from_beginning=False),
        running(store, cloud_events(other.url), from_beginning=True),
    ):
        await append(store, [3])
        await until(lambda: cursor_is(store, server.url, 3))
        await until(lambda: cursor_is(store, other.url, 3))
    assert server.keys == pairs([3])
    assert sorted(other.keys) == sorted(pairs([1, 2, 3]))
    await other.kill()


async def test_a_sink_that_is_configured_before_the_first_record_misses_none(store, server):
    await server.kill()
    async with running(store, cloud_events(server.url), from_beginning=False) as runner:
        await append(store, [1])
        await until(lambda: runner.counts["retried"] >= 1)
    await append(store, [2])
    await server.start()
    async with running(store, cloud_events(server.url), from_beginning=False):
        await until(lambda: cursor_is(store, server.url, 2))
    assert sorted(server.keys) == sorted(pairs([1, 2]))


async def test_failed_reads_of_the_store_are_repeated(store, server):
    read, move = store.after, store.move_cursor
    calls = Counter()

    async def after(*arguments):
        calls["after"] += 1
        if calls["after"] % 2:
            raise NotReadyError("the payload store does not answer")
        return await read(*arguments)

    async def move_cursor(*arguments):
        calls["move"] += 1
        if calls["move"] % 2:
            raise NotReadyError("the payload store does not answer")
        await move(*arguments)

    async with running(store, cloud_events(server.url)):
        store.after, store.move_cursor = after, move_cursor
        await append(store, range(1, 11))
        await until(lambda: cursor_is(store, server.url, 10))
    assert sorted(server.keys) == sorted(pairs(range(1, 11)))


class StubbornSink:
    """Accepts events only when the test opens it, and counts the bytes in flight."""

    name = "stubborn"

    def __init__(self):
        self.released = asyncio.Event()
        self.waiting = 0
        self.most = 0

    def events(self, record):
        return [Event(record.record_id, {}, record.prompt.encode())]

    async def send(self, event):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.released.wait()
        self.waiting -= 1

    async def close(self):
        pass


async def test_few_large_records_are_in_flight_at_a_time(store, monkeypatch):
    monkeypatch.setattr(runner_module, "_MAX_BYTES", 250_000)
    await store.append([append_request(number, prompt="p" * 100_000) for number in range(1, 9)])
    await store.append([append_request(9, prompt="p" * 1_000_000)])
    sink = StubbornSink()
    async with running(store, sink, concurrency=8):
        await until(lambda: sink.waiting == 2)
        sink.released.set()
        await until(lambda: cursor_is(store, "stubborn", 9))
    assert sink.most == 2


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        ("0", 0),
        ("99999999", 3600),
        ("", 0),
        ("soon", 0),
        ("-5", 0),
        ("²", 0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600),
    ],
)
async def test_the_retry_after_header_of_a_sink_is_read(server, value, seconds):
    async def answer(event):
        return 429, {"retry-after": value} if value.isascii() else {}

    server.answer = answer
    sink = cloud_events(server.url)
    (event, _) = sink.events(append_request(1).record)
    with pytest.raises(TryAgainError) as caught:
        await sink.send(event)
    assert caught.value.retry_after_s == seconds
    await sink.close()


async def test_the_retry_delay_of_a_sink_is_kept(store, monkeypatch):
    class Busy(StubbornSink):
        async def send(self, event):
            raise TryAgainError("busy", 3600)

    sleep, slept = asyncio.sleep, set()

    async def short_sleep(delay_s, result=None):
        slept.add(delay_s)
        return await sleep(min(delay_s, 0.001), result)

    monkeypatch.setattr(asyncio, "sleep", short_sleep)
    await append(store, [1])
    async with running(store, Busy()) as runner:
        await until(lambda: runner.counts["retried"] >= 3)
    assert 3600 in slept


async def test_a_refusal_differs_from_a_failure(server):
    sink = cloud_events(server.url)
    server.answer = lambda event: asyncio.sleep(0, (410, {}))
    with pytest.raises(RefusedError):
        await sink.send(sink.events(append_request(1).record)[0])
    await sink.close()


async def test_few_large_records_are_read_at_a_time(store, monkeypatch):
    monkeypatch.setattr(reading, "_BYTES_PER_READ", 250_000)
    await store.append([append_request(number, prompt="p" * 100_000) for number in range(1, 9)])
    assert [stored.position for stored in await store.after(0, 64)] == [1, 2, 3]
    assert [stored.position for stored in await store.after(3, 2)] == [4, 5]


class FailingSink(StubbornSink):
    """Raises unexpected errors for records of certain models."""

    name = "failing"

    def __init__(self):
        super().__init__()
        self.sent = []

    def events(self, record):
        if record.model == "no events":
            raise KeyError(record.record_id)
        return [Event(record.model, {}, b"")]

    async def send(self, event):
        if event.id == "no sending":
            raise ZeroDivisionError
        self.sent.append(event.id)


async def test_a_sink_with_an_unexpected_error_continues_with_the_next_record(store, caplog):
    models = ["a", "no events", "b", "no sending", "c"]
    await store.append([append_request(number, model=model) for number, model in enumerate(models, 1)])
    async with running(store, sink := FailingSink()) as runner:
        await until(lambda: cursor_is(store, sink.name, len(models)))
        assert sorted(sink.sent) == ["a", "b", "c"]
        assert runner.outcomes == {"delivered": 3, "retried": 9, "refused": 0, "failed": 2}
        await store.append([append_request(9, model="later")])
        await until(lambda: "later" in sink.sent)
    assert sum("cannot convert the record" in message for message in caplog.messages) == 1
    assert sum("which is skipped" in message for message in caplog.messages) == 1


async def test_a_sink_continues_after_its_reader_has_failed(store, server, monkeypatch, caplog):
    after, failures = store.after, [ValueError("of no kind that is known")]

    async def failing_after(position, limit):
        if position >= 2 and failures:
            raise failures.pop()
        return await after(position, limit)

    monkeypatch.setattr(store, "after", failing_after)
    await append(store, [1, 2])
    async with running(store, cloud_events(server.url)) as runner:
        await until(lambda: not failures)
        await append(store, [3])
        await until(lambda: cursor_is(store, server.url, 3))
        await until(lambda: runner.lag_s == 0)
    assert set(server.keys) == set(pairs([1, 2, 3]))
    assert "it is restarted" in caplog.text
