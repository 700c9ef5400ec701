"""Tail sends each committed record once, blocks no other call, and ends with a reason."""

import asyncio
import tracemalloc
import uuid
from contextlib import ExitStack

import grpc
import pytest

from headrace.errors import NotReadyError, OverloadedError
from headrace.rpc.client.channel import open_channel
from headrace.rpc.server.handlers import Interceptor
from headrace_logger.servicer import PayloadIngestServicer, PayloadLogServicer
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_logger.tails import MAX_KEPT, MAX_TAILS, MAX_TAILS_OF_ONE, Tails
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest, TailPayloadsRequest
from tests.process.test_logger_store import RECORDS, append_request, record_id, stored
from tests.waiting import until

NOTHING = Filters(TailPayloadsRequest())
REST = (("x-envoy-original-path", "/headrace/v1/payloads:tail"),)


def of(client):
    """The metadata that the gateway sets for a client's call."""
    return (("x-headrace-client", client), ("x-headrace-policy", '{"role": "admin"}'))


def record(number, **fields):
    return PayloadRecord(record_id=record_id(number), **fields)


@pytest.fixture
async def served(tmp_path):
    """A logger in this process: its store, its tails, and a channel to it."""
    store, tails = Store(tmp_path / "payloads.sqlite3"), Tails()
    server = grpc.aio.server(interceptors=(Interceptor("logger"),))
    PayloadLogServicer(store, tails).add_to(server)
    ingest = PayloadIngestServicer(store, tails, asyncio.Event())
    headrace_pb2_grpc.add_PayloadIngestServicer_to_server(ingest, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "logger") as channel:
        yield store, tails, channel
    await server.stop(None)
    await store.close()


async def append(channel, *requests):
    async for _ in headrace_pb2_grpc.PayloadIngestStub(channel).Append(iter(requests)):
        pass


async def open_tail(channel, metadata=None, **filters):
    """A call of Tail that has begun."""
    call = headrace_pb2_grpc.PayloadLogStub(channel).Tail(TailPayloadsRequest(**filters), metadata=metadata)
    responses = aiter(call)
    return call, responses


async def begun(tails, count=1):
    await until(lambda: len(tails) >= count)


async def test_records_are_sent_once_as_they_are_committed(served):
    store, tails, channel = served
    _, responses = await open_tail(channel)
    first = asyncio.ensure_future(anext(responses))
    await begun(tails)
    await append(channel, append_request(1), append_request(2))
    await append(channel, append_request(1), append_request(2), append_request(3))
    shown = [(await first).record_id, (await anext(responses)).record_id, (await anext(responses)).record_id]
    assert shown == [record_id(1), record_id(2), record_id(3)]
    assert await stored(store, 3) is not None


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
async def test_a_filter_of_tail_equals_the_same_filter_of_query(served, filters):
    store, tails, _ = served
    requests = [append_request(n, time_ns=n * 1_000_000, **fields) for n, fields in RECORDS.items()]
    with tails.open(Filters(TailPayloadsRequest(**filters))) as tail:
        tails.show(await store.append(requests))
        tails.show([record(99, model="a", status="OK", trace_id="t3", request_id="same", duration_ms=99)])
        found = [r.record async for r in store.query(Filters(QueryPayloadsRequest(**filters)), None, 1000)]
        shown = [(await tail.next()).record for _ in found]
    assert [one.record_id for one in shown] == [one.record_id for one in reversed(found)]


async def test_only_a_reader_that_is_too_slow_is_cut_off(served):
    _, tails, _ = served
    with tails.open(NOTHING) as slow, tails.open(NOTHING) as quick:
        for n in range(MAX_KEPT + 1):
            tails.show([record(n)])
            assert (await quick.next()).record.record_id == record_id(n)
        with pytest.raises(OverloadedError, match="the reader is too slow and has missed records"):
            await slow.next()
        tails.show([record(5000)])
        assert (await quick.next()).record.record_id == record_id(5000)


async def test_the_records_kept_for_all_tails_are_bounded_in_bytes_too(served):
    _, tails, _ = served
    with ExitStack() as stack:
        slow = [stack.enter_context(tails.open(NOTHING, f"c{n}")) for n in range(MAX_TAILS)]
        tracemalloc.start()
        for n in range(60):
            tails.show([record(n, text="x" * 1024 * 1024)])
        assert tracemalloc.get_traced_memory()[0] < 24 << 20
        tracemalloc.stop()
        for tail in slow:
            with pytest.raises(OverloadedError, match="has missed records"):
                await tail.next()
    with tails.open(NOTHING) as tail:
        tails.show([record(1)])
        assert (await tail.next()).record.record_id == record_id(1)


async def test_a_commit_larger_than_the_buffer_is_sent_whole(served):
    _, tails, _ = served
    with tails.open(NOTHING) as tail:
        tails.show([record(n) for n in range(3 * MAX_KEPT)])
        assert [(await tail.next()).record.record_id for _ in range(3 * MAX_KEPT)][-1] == record_id(3 * MAX_KEPT - 1)


async def test_many_filtered_records_delay_no_other_call(served):
    _, tails, _ = served
    with tails.open(Filters(TailPayloadsRequest(model="other"))) as tail:
        reading = asyncio.ensure_future(tail.next())
        await until(lambda: tail.is_waiting)
        tails.show([record(n) for n in range(MAX_KEPT)])
        turns = 0
        while not tail.is_waiting or turns == 0:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= MAX_KEPT / 100
        reading.cancel()


async def test_a_tail_beyond_the_limit_displaces_an_idle_one_of_the_client_with_the_most(served):
    _, tails, channel = served
    opened = [await open_tail(channel, metadata=of("loud")) for _ in range(MAX_TAILS_OF_ONE)]
    loud = [asyncio.ensure_future(anext(responses)) for _, responses in opened]
    await until(lambda: len(tails) == MAX_TAILS_OF_ONE)
    others = [await open_tail(channel, metadata=of(f"quiet {n}")) for n in range(MAX_TAILS - MAX_TAILS_OF_ONE)]
    quiet = [asyncio.ensure_future(anext(responses)) for _, responses in others]
    await until(lambda: len(tails) == MAX_TAILS)
    _, responses = await open_tail(channel, metadata=of("late"))
    late = asyncio.ensure_future(anext(responses))
    await until(lambda: sum(one.done() for one in loud) == 1)
    _, responses = await open_tail(channel, metadata=of("loud"))
    again = asyncio.ensure_future(anext(responses))
    await until(lambda: sum(one.done() for one in loud) == 2)
    for one in loud:
        if one.done():
            with pytest.raises(OverloadedError, match="too many tails are open: a newer one replaced this one"):
                await one
    assert len(tails) == MAX_TAILS
    await append(channel, append_request(7))
    for one in (late, again, *quiet, *(one for one in loud if not one.done())):
        assert (await one).record_id == record_id(7)


async def test_a_client_beyond_its_own_limit_of_tails_displaces_its_own(served):
    _, tails, _ = served
    other, own = tails.open(NOTHING, "other"), [tails.open(NOTHING, "greedy") for _ in range(MAX_TAILS_OF_ONE)]
    with ExitStack() as stack:
        first = stack.enter_context(other)
        waiting = [asyncio.ensure_future(stack.enter_context(one).next()) for one in own]
        first_waits = asyncio.ensure_future(first.next())
        await until(lambda: first.is_waiting)
        stack.enter_context(tails.open(NOTHING, "greedy"))
        with pytest.raises(OverloadedError, match="a newer one"):
            await waiting[0]
        assert not first_waits.done()
        for one in (first_waits, *waiting):
            one.cancel()


async def test_tails_with_stalled_readers_keep_their_places_and_others_are_refused():
    tails = Tails(max_tails=2, max_of_one=2)
    with tails.open(NOTHING, "a"), tails.open(NOTHING, "b"):
        with pytest.raises(OverloadedError, match="0 of them of this caller"), tails.open(NOTHING, "c"):
            pass
        assert len(tails) == 2


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


async def test_a_rest_stream_ends_with_its_reason(served):
    _, tails, channel = served
    _, responses = await open_tail(channel, metadata=REST)
    reading = asyncio.ensure_future(anext(responses))
    await begun(tails)
    tails.end()
    assert (await reading) == PayloadRecord(error="the logger is stopping")
    with pytest.raises(NotReadyError):
        await anext(responses)


async def test_append_returns_only_the_new_records(served):
    store, _, _ = served
    source = str(uuid.uuid4())
    first, second = append_request(1, source=source), append_request(2, source=source)
    moved = AppendRequest(source=source, sequence=1, record=record(9))
    assert await store.append([first, first]) == [first.record]
    assert await store.append([moved, first, second]) == [second.record]
    assert await store.append([]) == []
