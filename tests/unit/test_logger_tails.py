"""Tail shows each committed record once, holds up nobody, and ends with a reason."""

import asyncio
import uuid

import grpc
import pytest

from millrace.channel import open_channel
from millrace.errors import NotReadyError, OverloadedError
from millrace.interceptors import ErrorServerInterceptor
from millrace.protos import millrace_pb2_grpc
from millrace.protos.millrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest, TailPayloadsRequest
from services.logger.filters import Filters
from services.logger.servicer import PayloadIngestServicer, PayloadLogServicer
from services.logger.store import SqliteStore
from services.logger.tails import MAX_TAILS, MAX_WAITING, Tails
from tests.unit.test_logger_store import RECORDS, append_request, record_id
from tests.waiting import until

NOTHING = Filters(TailPayloadsRequest())
REST = (("x-envoy-original-path", "/millrace/v1/payloads:tail"),)


def record(number, **fields):
    return PayloadRecord(record_id=record_id(number), **fields)


@pytest.fixture
async def served(tmp_path):
    """A logger in this process: its store, its tails, and a channel to it."""
    store, tails = SqliteStore(tmp_path / "payloads.sqlite3"), Tails()
    server = grpc.aio.server(interceptors=(ErrorServerInterceptor("logger"),))
    millrace_pb2_grpc.add_PayloadLogServicer_to_server(PayloadLogServicer(store, tails), server)
    ingest = PayloadIngestServicer(store, tails, asyncio.Event())
    millrace_pb2_grpc.add_PayloadIngestServicer_to_server(ingest, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "logger") as channel:
        yield store, tails, channel
    await server.stop(None)
    await store.close()


async def append(channel, *requests):
    async for _ in millrace_pb2_grpc.PayloadIngestStub(channel).Append(iter(requests)):
        pass


async def open_tail(channel, metadata=None, **filters):
    """A call of Tail that has begun."""
    call = millrace_pb2_grpc.PayloadLogStub(channel).Tail(TailPayloadsRequest(**filters), metadata=metadata)
    responses = aiter(call)
    return call, responses


async def begun(tails, count=1):
    await until(lambda: len(tails) >= count)


async def test_records_come_as_they_are_committed_and_once(served):
    store, tails, channel = served
    _, responses = await open_tail(channel)
    first = asyncio.ensure_future(anext(responses))
    await begun(tails)
    await append(channel, append_request(1), append_request(2))
    await append(channel, append_request(1), append_request(2), append_request(3))
    shown = [(await first).record_id, (await anext(responses)).record_id, (await anext(responses)).record_id]
    assert shown == [record_id(1), record_id(2), record_id(3)]
    assert await store.get(record_id(3)) is not None


@pytest.mark.parametrize(
    "filters",
    [
        {"model": "a"},
        {"status": "OK"},
        {"finish_reason": ""},
        {"finish_reason": "length"},
        {"request_id": "same"},
        {"trace_id": "t3"},
        {"min_duration_ms": 20.0},
        {"min_ttft_ms": 2.0},
        {"text_contains": "needle"},
        {"model": "b", "request_id": "same", "text_contains": "needle"},
        {},
    ],
    ids=str,
)
async def test_a_filter_of_tail_passes_what_the_same_filter_of_query_finds(served, filters):
    store, tails, _ = served
    requests = [append_request(n, time_ns=n * 1_000_000, **fields) for n, fields in RECORDS.items()]
    with tails.open(Filters(TailPayloadsRequest(**filters))) as tail:
        tails.show(await store.append(requests))
        tails.show([record(99, model="a", status="OK", trace_id="t3", request_id="same", duration_ms=99)])
        found = [r async for r in store.query(Filters(QueryPayloadsRequest(**filters)), None, 1000)]
        shown = [await tail.next() for _ in found]
    assert [one.record_id for one in shown] == [one.record_id for one in reversed(found)]


async def test_a_reader_that_is_too_slow_is_cut_off_and_nobody_else(served):
    _, tails, _ = served
    with tails.open(NOTHING) as slow, tails.open(NOTHING) as quick:
        for n in range(MAX_WAITING + 1):
            tails.show([record(n)])
            assert (await quick.next()).record_id == record_id(n)
        with pytest.raises(OverloadedError, match="the reader is too slow: 1001 records wait"):
            await slow.next()
        tails.show([record(5000)])
        assert (await quick.next()).record_id == record_id(5000)


async def test_what_waits_is_bounded_in_bytes_too(served):
    _, tails, _ = served
    with tails.open(NOTHING) as slow:
        for n in range(20):
            tails.show([record(n, text="x" * 1024 * 1024)])
        with pytest.raises(OverloadedError, match="16 records wait"):
            await slow.next()


async def test_more_tails_than_there_may_be_are_refused_until_one_closes(served):
    _, tails, channel = served
    calls = [await open_tail(channel) for _ in range(MAX_TAILS)]
    reading = [asyncio.ensure_future(anext(responses)) for _, responses in calls]
    await begun(tails, MAX_TAILS)
    _, refused = await open_tail(channel)
    with pytest.raises(OverloadedError, match="64 tails are open"):
        await anext(refused)
    reading[0].cancel()
    await until(lambda: len(tails) < MAX_TAILS)
    _, responses = await open_tail(channel)
    last = asyncio.ensure_future(anext(responses))
    await begun(tails, MAX_TAILS)
    await append(channel, append_request(7))
    assert (await last).record_id == record_id(7)
    await asyncio.gather(*reading, return_exceptions=True)


async def test_every_tail_ends_when_the_logger_stops(served):
    _, tails, channel = served
    _, responses = await open_tail(channel)
    reading = asyncio.ensure_future(anext(responses))
    await begun(tails)
    tails.end()
    with pytest.raises(NotReadyError, match="the logger is stopping"):
        await reading
    with pytest.raises(NotReadyError), tails.open(NOTHING):
        pass


async def test_a_rest_reader_is_told_in_the_stream_why_it_ended(served):
    _, tails, channel = served
    _, responses = await open_tail(channel, metadata=REST)
    reading = asyncio.ensure_future(anext(responses))
    await begun(tails)
    tails.end()
    assert (await reading) == PayloadRecord(error="the logger is stopping")
    with pytest.raises(NotReadyError):
        await anext(responses)


async def test_append_gives_back_the_new_records_alone(served):
    store, _, _ = served
    source = str(uuid.uuid4())
    first, second = append_request(1, source=source), append_request(2, source=source)
    moved = AppendRequest(source=source, sequence=1, record=record(9))
    assert await store.append([first, first]) == [first.record]
    assert await store.append([moved, first, second]) == [second.record]
    assert await store.append([]) == []
