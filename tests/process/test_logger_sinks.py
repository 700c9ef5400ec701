"""A sink gets every record's events at least once and in order, through all its failures, and delays only itself."""

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks import SINK, observe_sinks
from headrace_logger.sinks import runner as runner_module
from headrace_logger.sinks.cloud_events import CloudEventsSink
from headrace_logger.sinks.delivery import Event, TryAgainError
from headrace_logger.sinks.otlp import span_of
from headrace_logger.sinks.runner import SinkRunner
from headrace_logger.store import reading
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import AppendRequest, PayloadChunk, PayloadRecord, Usage
from tests.process.sink_server import ACCEPTED, SinkServer
from tests.support.logger_process import LoggerProcess, free_port
from tests.support.measured import Measured
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.payload_records import answered, append_to, record_id
from tests.waiting import until


async def append(store, numbers):
    await store.append([answered(number) for number in numbers])


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


@asynccontextmanager
async def started():
    server = SinkServer()
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def server():
    async with started() as server:
        yield server


@pytest.fixture
async def other():
    """Another sink."""
    async with started() as server:
        yield server


def settings(concurrency=4, **others):
    return LoggerSettings.model_construct(sink_concurrency=concurrency, **others)


def cloud_events(url, timeout_s=20.0, connections=4):
    return CloudEventsSink(url, settings(connections, sink_timeout_s=timeout_s))


@asynccontextmanager
async def running(store, sink, concurrency=4, from_beginning=True):
    runner = SinkRunner(sink, store, settings(concurrency, sink_from="beginning" if from_beginning else "now"))
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
    await append(store, range(1, 61))
    async with running(store, cloud_events(server.url), concurrency=4):
        await until(lambda: len(server.taken) == 120)
        await until(lambda: cursor_is(store, server.url, 60))
    assert sorted(server.keys) == sorted(pairs(range(1, 61)))
    assert server.at_once == 4
    first = {key: place for place, key in reversed(list(enumerate(server.keys)))}
    assert all(first[request] < first[answer] for request, answer in zip(*[iter(pairs(range(1, 61)))] * 2, strict=True))


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


@pytest.mark.parametrize("status", [408, 429, 503, 301])
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


@pytest.mark.parametrize("status", [400, 413])
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


async def test_a_connection_without_an_answer_leaves_room_for_the_next(store, server):
    hanging = 20

    async def answer(event):
        if server.tries <= hanging:
            await asyncio.Event().wait()
        return ACCEPTED

    server.answer = answer
    await append(store, range(1, 5))
    async with running(store, cloud_events(server.url, timeout_s=0.05, connections=2), concurrency=2) as runner:
        await until(lambda: cursor_is(store, server.url, 4))
    assert set(server.keys) == set(pairs(range(1, 5)))
    assert runner.counts["retried"] >= hanging


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


async def test_a_hanging_sink_delays_neither_the_log_nor_another_sink_and_reads_no_further(
    store, server, other, monkeypatch
):
    monkeypatch.setattr(runner_module, "_PAGE", 32)
    other.answer = lambda event: asyncio.Event().wait()
    watched = WatchedStore(store)
    async with running(store, cloud_events(server.url)), running(watched, cloud_events(other.url)) as stuck:
        for first in range(1, 101, 10):
            await append(store, range(first, first + 10))
        await until(lambda: cursor_is(store, server.url, 100))
        # More once a request is repeated that had no answer in time.
        await until(lambda: other.at_once >= 4)
        assert stuck.counts == {}
        # Unsent records are in the store, not in memory: only one page was read.
        assert set(watched.read_after) == {0}
    assert sorted(server.keys) == sorted(pairs(range(1, 101)))
    assert await cursor_is(store, other.url, 0)


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


async def test_a_new_sink_begins_now_or_at_the_beginning(store, server, other):
    await append(store, [1, 2])
    async with (
        running(store, cloud_events(server.url), from_beginning=False),
        running(store, cloud_events(other.url), from_beginning=True),
    ):
        await append(store, [3])
        await until(lambda: cursor_is(store, server.url, 3))
        await until(lambda: cursor_is(store, other.url, 3))
    assert server.keys == pairs([3])
    assert sorted(other.keys) == sorted(pairs([1, 2, 3]))


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
    monkeypatch.setattr(reading, "_BYTES_PER_READ", 150_000)
    await store.append([answered(number, prompt="p" * 100_000) for number in range(1, 9)])
    await store.append([answered(9, prompt="p" * 1_000_000)])
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
        ("99999999", 3600),
        ("", 0),
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
    (event, _) = sink.events(answered(1).record)
    with pytest.raises(TryAgainError, check=lambda error: error.retry_after_s == seconds):
        await sink.send(event)
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
    await store.append([answered(number, model=model) for number, model in enumerate(models, 1)])
    async with running(store, sink := FailingSink()) as runner:
        await until(lambda: cursor_is(store, sink.name, len(models)))
        assert sorted(sink.sent) == ["a", "b", "c"]
        assert runner.outcomes == {"delivered": 3, "retried": 9, "refused": 0, "failed": 2}
        await store.append([answered(9, model="later")])
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


async def send(target, requests):
    async with grpc.aio.insecure_channel(target) as channel:
        await append_to(channel, requests)


def recent(numbers):
    return (answered(number, time_ns=time.time_ns()) for number in numbers)


async def test_a_logger_that_is_killed_sends_every_event(server, tmp_path):
    keys = {(f"/log/{part}", str(uuid.UUID(int=n))) for n in range(1, 301) for part in ("request", "response")}
    async with LoggerProcess(tmp_path) as process:
        process.environment |= {"LOGGER_SINKS": server.url, "LOGGER_SINK_SOURCE": "/log"}
        await process.start()
        await send(process.target, recent(range(1, 101)))
        await until(lambda: len(server.taken) >= 30)
        await process.kill()
        await process.start()
        # Now the sink is away while records arrive and when the logger is killed.
        await server.kill()
        await send(process.target, recent(range(101, 301)))
        await process.kill()
        await server.start()
        await process.start()
        await until(lambda: set(server.keys) == keys)
    assert set(server.keys) == keys


TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wer da?"}]


def generation(number, **fields):
    own = {
        "record_id": str(uuid.UUID(int=number)),
        "request_id": f"request-{number}",
        "model": "storyteller",
        "prompt": json.dumps(CHAT),
        "prompt_kind": "messages",
        "text": "Fünf Füchse.",
        "chunks": [PayloadChunk(text="Fünf Füchse.", token_ids=[1, 2, 3])],
        "status": "OK",
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3),
        "sampling": json.dumps({"temperature": 0.5, "max_tokens": 16, "seed": 7, "stop": ["\n"]}),
        "ttft_ms": 30.0,
        "duration_ms": 250.0,
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "client": "ann",
    }
    record = PayloadRecord(**own | fields)
    record.time.FromMilliseconds(1_700_000_000_000)
    return AppendRequest(source="s", sequence=number, record=record)


def plain(span):
    """The span's attributes as plain values."""
    values = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        values[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


def test_a_chat_has_the_attributes_of_the_conventions():
    span = span_of(generation(1).record)
    values = plain(span)
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat storyteller", TRACE_ID, SPAN_ID)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    assert json.loads(values.pop("gen_ai.input.messages")) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Wer da?"}]},
    ]
    assert json.loads(values.pop("gen_ai.output.messages")) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "Fünf Füchse."}], "finish_reason": "stop"}
    ]
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "storyteller",
        "gen_ai.response.model": "storyteller",
        "gen_ai.response.id": "request-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.03,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["\n"],
        "user.id": "ann",
        "headrace.record_id": str(uuid.UUID(int=1)),
        "headrace.protocol": "",
    }


def test_all_names_are_those_of_the_installed_conventions():
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    names = {name for name in plain(span_of(generation(1).record)) if name.startswith("gen_ai.")}
    assert names <= known


def test_a_failed_completion_without_a_trace_is_an_error_in_a_trace_of_its_own():
    fields = {"prompt": "Once", "prompt_kind": "text", "text": "", "chunks": [], "status": "INTERNAL", "message": "why"}
    span = span_of(generation(5, trace_id="", span_id="x", finish_reason="", sampling='{"temp', **fields).record)
    values = plain(span)
    assert span.name == "text_completion storyteller"
    assert (span.status.message, values["error.type"]) == ("why", "INTERNAL")
    assert (span.trace_id, span.parent_span_id) == (uuid.UUID(int=5).bytes, b"")
    assert json.loads(values["gen_ai.input.messages"])[0]["parts"] == [{"type": "text", "content": "Once"}]
    assert "gen_ai.output.messages" not in values
    assert span.span_id == span_of(generation(5).record).span_id


async def test_every_generation_arrives_though_receiver_and_logger_die(tmp_path):
    port = free_port()
    async with LoggerProcess(tmp_path) as logger:
        logger.environment |= {
            "LOGGER_GEN_AI_URL": f"grpc://127.0.0.1:{port}",
            "LOGGER_RETENTION_DAYS": "0",  # The records are old.
            "LOGGER_GEN_AI_HEADERS": "Authorization=Basic%20YTpi,x-scope=team",
        }
        await logger.start()
        # Nobody listens yet: the log takes no notice.
        await send(logger.target, map(generation, range(1, 51)))
        await logger.kill()
        await logger.start()
        tensor = AppendRequest(source="s", sequence=51, record=PayloadRecord(record_id=str(uuid.UUID(int=51))))
        with OtlpReceiver(port) as receiver:
            receiver.refuse = grpc.StatusCode.UNAUTHENTICATED  # Tried again: it may be corrected.
            await send(logger.target, (tensor, generation(52)))
            await until(lambda: receiver.headers.get("authorization") == "Basic YTpi")
            receiver.refuse = None
            expected = {str(uuid.UUID(int=number)) for number in (*range(1, 51), 52)}
            await until(lambda: {span.attributes["headrace.record_id"] for span in receiver.all_spans()} == expected)
            assert len({span.span_id for span in receiver.all_spans()}) == 51


async def test_http_receivers_get_the_same_spans(server, tmp_path):
    received = []

    async def answer(request):
        received.append(request)
        return (503 if len(received) == 1 else 200), {}

    server.path, server.read, server.answer = (
        "/api/public/otel/v1/traces",
        lambda headers, body: (headers, body),
        answer,
    )
    async with LoggerProcess(tmp_path) as logger:
        logger.environment |= {"LOGGER_GEN_AI_URL": server.url, "LOGGER_GEN_AI_HEADERS": "authorization=Basic abc"}
        await logger.start()
        await send(logger.target, [generation(1)])
        await until(lambda: len(received) == 2)
    headers, body = received[1]
    assert (headers["content-type"], headers["authorization"]) == ("application/x-protobuf", "Basic abc")
    (span,) = trace_pb2.ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert span == span_of(generation(1).record)


class Lags(Measured):
    def lag(self, name):
        return self.values_by(SINK, "headrace.sink.lag")[name]


@pytest.fixture
def measured():
    return Lags()


@pytest.fixture
async def late(store, measured):
    """Starts runners to servers, by name, with their lags observed."""
    async with AsyncExitStack() as stack:

        async def run(**servers):
            runners = {
                name: await stack.enter_async_context(running(store, cloud_events(server.url), 2))
                for name, server in servers.items()
            }
            observe_sinks(runners, measured.meter)

        yield run


async def test_the_lag_of_a_sink_lasts_from_its_failure_until_it_has_all_records(server, other, late, store, measured):
    await late(a=server, b=other)
    assert measured.lag("a") == measured.lag("b") == 0
    await store.append([ended_ago(1, 60)])
    await until(lambda: len(server.taken) == len(other.taken) == 2)
    await until(lambda: measured.lag("a") == measured.lag("b") == 0)

    await server.kill()
    # The lag is that of the oldest waiting record, counted from its end, however many arrive later.
    await store.append([ended_ago(2, 100, duration_ms=500_000)])
    await until(lambda: 100 <= measured.lag("a") < 200)
    await store.append([ended_ago(number, 10) for number in range(3, 20)])
    await until(lambda: len(other.taken) == 2 * 19)
    await until(lambda: measured.lag("b") == 0)
    assert 100 <= measured.lag("a") < 200

    await server.start()
    await until(lambda: measured.lag("a") < 100)
    await until(lambda: measured.lag("a") == 0)
    assert len(server.taken) >= 2 * 19


async def test_the_lag_of_a_sink_that_is_down_at_the_start_is_that_of_its_waiting_records(
    server, late, store, measured
):
    await server.kill()
    await store.append([ended_ago(1, 100), ended_ago(2, 5)])
    await late(a=server)
    await until(lambda: 100 <= measured.lag("a") < 200)


def ended_ago(number, seconds, duration_ms=0.0):
    request = answered(number, duration_ms=duration_ms)
    request.record.time.FromMicroseconds(int((time.time() - seconds) * 1e6 - duration_ms * 1e3))
    return request
