"""Get, Query, Tail and Delete: each client its own records, within bounds of memory, each committed record once."""

import asyncio
import base64
import tracemalloc
import uuid
from contextlib import AsyncExitStack

import grpc
import pytest

from headrace.errors import ForbiddenError, NotFoundError, NotReadyError, OverloadedError
from headrace.rpc.client.channel import open_channel
from headrace_logger.read_limits import FREE_BYTES, Readers
from headrace_logger.servicer import PayloadIngestServicer, PayloadLogServicer
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_logger.tails import MAX_TAILS, MAX_TAILS_OF_ONE, Tails
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import (
    DeletePayloadsRequest,
    GetPayloadRequest,
    QueryPayloadsRequest,
    TailPayloadsRequest,
    UsageRequest,
)
from tests.support.payload_fixtures import only_sqlite
from tests.support.payload_records import (
    RECORDS,
    append_request,
    append_to,
    client,
    following,
    number_of,
    numbers,
    record_id,
    serving,
    stored,
)
from tests.waiting import until

ANN, ADMIN = client("ann", "{}"), client("root")
NONE = ()


@pytest.fixture
async def served(store):
    """The service: odd records are ann's, even ones bob's."""
    service = PayloadLogServicer(store, Tails(store))
    async with serving(service) as target, open_channel(target, "logger") as channel:
        await store.append([of(n) for n in range(1, 7)])
        yield headrace_pb2_grpc.PayloadLogStub(channel)


def of(number, **fields):
    client = "ann" if number % 2 else "bob"
    return append_request(number, **{"client": client, "request_id": "same", "time_ns": number * 1000, **fields})


async def found(stub, metadata, **filters):
    records = stub.Query(QueryPayloadsRequest(**filters), metadata=metadata)
    return [uuid.UUID(record.record_id).int async for record in records]


async def test_a_query_finds_only_records_that_its_caller_may_read(served):
    for metadata, filters, expected in (
        (ANN, {}, [5, 3, 1]),
        (ANN, {"client": "ann"}, [5, 3, 1]),
        (ANN, {"request_id": "same"}, [5, 3, 1]),
        (ADMIN, {}, [6, 5, 4, 3, 2, 1]),
        (ADMIN, {"client": "bob"}, [6, 4, 2]),
        (NONE, {"client": "bob"}, [6, 4, 2]),
    ):
        assert await found(served, metadata, **filters) == expected, (metadata, filters)


async def test_another_client_s_name_is_refused_whether_it_exists_or_not(served):
    stub = served
    for name in ("bob", "nobody", ""):
        for call in (
            lambda name: anext(aiter(stub.Query(QueryPayloadsRequest(client=name), metadata=ANN))),
            lambda name: anext(aiter(stub.Tail(TailPayloadsRequest(client=name), metadata=ANN))),
            lambda name: stub.Usage(UsageRequest(client=name), metadata=ANN),
        ):
            with pytest.raises(ForbiddenError, match="ann may read and delete only its own records"):
                await call(name)
        with pytest.raises(ForbiddenError):
            await stub.Delete(DeletePayloadsRequest(client=name or "-"), metadata=ANN)


async def test_another_client_s_record_is_not_found(served):
    stub = served
    missing = GetPayloadRequest(record_id=record_id(99))
    for metadata, number in ((ANN, 2), (ANN, 99), (ADMIN, 99)):
        with pytest.raises(NotFoundError, match="no record has the record_id"):
            await stub.Get(GetPayloadRequest(record_id=record_id(number)), metadata=metadata)
    with pytest.raises(NotFoundError):
        await stub.Get(missing, metadata=ANN)
    for metadata, newest in ((ANN, 5), (ADMIN, 6), (NONE, 6)):
        record = await stub.Get(GetPayloadRequest(request_id="same"), metadata=metadata)
        assert record.record_id == record_id(newest)
    assert (await stub.Get(GetPayloadRequest(record_id=record_id(3)), metadata=ANN)).client == "ann"


async def test_page_tokens_continue_and_contain_no_data_of_other_clients(store, served):
    stub = served
    pages, token = [], None
    while page := [r async for r in stub.Query(QueryPayloadsRequest(page_size=1, page_token=token), metadata=ANN)]:
        token = page[0].page_token
        packed = base64.urlsafe_b64decode(token + "==")
        # A version, the record's time and its id.
        assert packed[1:] == page[0].time.ToMicroseconds().to_bytes(8, "big") + uuid.UUID(page[0].record_id).bytes
        pages.append(uuid.UUID(page[0].record_id).int)
    assert pages == [5, 3, 1]


async def test_a_page_continues_after_a_record_that_was_deleted_meanwhile(store, served):
    stub = served
    (first,) = [r async for r in stub.Query(QueryPayloadsRequest(page_size=1), metadata=ANN)]
    await store.delete(record_id=first.record_id)
    assert await found(stub, ANN, page_token=first.page_token) == [3, 1]


async def test_a_tail_shows_its_client_s_records(store, served):
    call = served.Tail(TailPayloadsRequest(), metadata=ANN)
    responses = aiter(call)
    reading = asyncio.ensure_future(anext(responses))
    await call.initial_metadata()
    await store.append([of(8), of(10), of(11)])
    assert (await reading).record_id == record_id(11)
    call.cancel()


@pytest.mark.parametrize(
    ("key", "deleted", "left"),
    [
        ({"record_id": record_id(2)}, 0, [6, 5, 4, 3, 2, 1]),
        ({"record_id": record_id(3)}, 1, [6, 5, 4, 2, 1]),
        ({"request_id": "same"}, 3, [6, 4, 2]),
        ({"client": "ann"}, 3, [6, 4, 2]),
    ],
)
async def test_a_client_deletes_its_own_records(store, served, key, deleted, left):
    assert (await served.Delete(DeletePayloadsRequest(**key), metadata=ANN)).deleted == deleted
    assert await numbers(store) == left


@only_sqlite
async def test_a_client_s_deletion_covers_its_own_late_records_and_no_other_s(store, served, tmp_path):
    stub = served
    await stub.Delete(DeletePayloadsRequest(request_id="same"), metadata=ANN)
    await stub.Delete(DeletePayloadsRequest(record_id=record_id(8)), metadata=ANN)
    await stub.Delete(DeletePayloadsRequest(record_id=record_id(9)), metadata=ANN)
    await store.append([of(7), of(8), of(9, request_id="other")])
    assert await numbers(store) == [8, 6, 4, 2]
    await store.close()
    again = Store(tmp_path / "payloads.sqlite3")
    await again.append([of(11), of(12)])
    assert await numbers(again) == [12, 8, 6, 4, 2]
    await again.close()


async def test_many_deletions_of_one_client_displace_none_of_another(store, monkeypatch):
    monkeypatch.setattr("headrace_logger.store.deletions.MAX_DELETIONS", 10)
    await store.delete("bob", record_id=record_id(2))
    await store.delete(record_id=record_id(4))
    for number in range(101, 131, 2):
        await store.delete("ann", record_id=record_id(number))
    await store.append([of(2), of(4), of(101), of(129)])
    assert await numbers(store) == [101]


MIB = 1 << 20
LARGE = 4 * MIB
UNREAD = (("grpc.max_receive_message_length", -1),)
# The window stays at 64 KiB: on any machine the connection buffers nothing beyond it that the caller does not read.
SMALL_WINDOW = (*UNREAD, ("grpc.http2.bdp_probe", 0))


class Served:
    """A logger in this process, and clients client it that read a message only on `read`."""

    def __init__(self, store, readers, target):
        self.store = store
        self.readers = readers
        self._channels = [grpc.insecure_channel(target, options) for options in (UNREAD, SMALL_WINDOW)]
        self.stub, self.unread = map(headrace_pb2_grpc.PayloadLogStub, self._channels)
        self.calls = []

    def query(self, of="c", stub=None, **filters):
        call = (stub or self.stub).Query(QueryPayloadsRequest(**filters), metadata=client(of))
        self.calls.append(call)
        return call

    async def read(self, call):
        return [uuid.UUID(record.record_id).int for record in await asyncio.to_thread(list, call)]

    def close(self):
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            channel.close()


@pytest.fixture
async def budgeted(store):
    readers = Readers(max_bytes=16 * MIB, max_readers=40, max_of_one=20, wait_s=0.5)
    service = PayloadLogServicer(store, Tails(store), readers)
    async with serving(service, options=(("grpc.max_send_message_length", -1),)) as target:
        one = Served(store, readers, target)
        yield one
        await asyncio.to_thread(one.close)


@only_sqlite
async def test_unread_large_records_take_no_more_memory_than_the_budget(budgeted):
    await budgeted.store.append([append_request(n, model="large", prompt="x" * LARGE) for n in range(1, 9)])
    await budgeted.store.append([append_request(n, model="small") for n in range(9, 20)])
    for _ in range(10):
        budgeted.query("idle", budgeted.unread, model="large")
    await until(lambda: budgeted.readers.lent_bytes >= LARGE)
    # Other clients' records, large or small, are read as usual from the same store.
    assert await budgeted.read(budgeted.query("other", model="large")) == list(range(8, 0, -1))
    # The memory client the other client's answer may not have been given back yet.
    assert LARGE <= budgeted.readers._lent["idle"] <= 8 * MIB + 1000, "client one caller half"
    assert await budgeted.read(budgeted.query("idle", model="small")) == list(range(19, 8, -1))
    # A waiting call is refused, and ended calls give back their memory.
    with pytest.raises(grpc.RpcError) as caught:
        await budgeted.read(budgeted.query("idle", model="large"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "wait to be read by their callers" in caught.value.details()
    for call in budgeted.calls:
        call.cancel()
    await until(lambda: budgeted.readers.lent_bytes == 0)
    assert await budgeted.read(budgeted.query("idle", model="large")) == list(range(8, 0, -1))


@only_sqlite
async def test_a_record_larger_than_the_budget_can_be_read(budgeted):
    await budgeted.store.append([append_request(1, prompt="x" * 20 * MIB)])
    assert await budgeted.read(budgeted.query()) == [1]
    record = await asyncio.to_thread(budgeted.stub.Get, GetPayloadRequest(record_id=record_id(1)))
    assert len(record.prompt) == 20 * MIB
    await until(lambda: budgeted.readers.lent_bytes == 0)


@only_sqlite
async def test_one_caller_s_many_calls_block_no_other_reader(budgeted):
    await budgeted.store.append([append_request(n, prompt="x" * FREE_BYTES) for n in range(1, 50)])
    idle = [budgeted.query("idle", budgeted.unread) for _ in range(20)]
    await until(lambda: len(budgeted.readers._readers) == 1 and budgeted.readers._readers["idle"] == 20)
    with pytest.raises(grpc.RpcError) as caught:
        await budgeted.read(budgeted.query("idle"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await budgeted.read(budgeted.query("other", page_size=1)) == [49]
    for call in idle[1:]:
        call.cancel()
    assert await budgeted.read(idle[0]) == list(range(49, 0, -1))


@only_sqlite
async def test_a_search_for_text_goes_through_large_records_in_order(budgeted):
    await budgeted.store.append(
        [append_request(n, prompt=("needle" if n % 3 == 0 else "hay") + "x" * (n % 5) * MIB) for n in range(1, 16)]
    )
    assert await budgeted.read(budgeted.query(text_contains="needle")) == [15, 12, 9, 6, 3]
    assert await budgeted.read(budgeted.query(text_contains="needle", page_size=2)) == [15, 12]


NOTHING = Filters(TailPayloadsRequest())


async def read_until(records, last):
    """The numbers of records up to one."""
    number = 0
    while number != last:
        number = number_of(await anext(records))
        yield number


class Ingest(PayloadIngestServicer):
    def add_to(self, server):
        headrace_pb2_grpc.add_PayloadIngestServicer_to_server(self, server)


@pytest.fixture
async def followed(tmp_path):
    """A logger in this process: its store, its tails, and a channel to it."""
    store = Store(tmp_path / "payloads.sqlite3")
    tails = Tails(store)
    services = PayloadLogServicer(store, tails), Ingest(store, asyncio.Event())
    async with serving(*services) as target, open_channel(target, "logger") as channel:
        yield store, tails, channel
    await store.close()


async def open_tail(channel, metadata=None, **filters):
    """A call of Tail that has begun."""
    call = headrace_pb2_grpc.PayloadLogStub(channel).Tail(TailPayloadsRequest(**filters), metadata=metadata)
    responses = aiter(call)
    return call, responses


async def begun(tails, count=1):
    await until(lambda: len(tails) >= count)


async def test_records_are_sent_once_as_they_are_committed(followed):
    store, tails, channel = followed
    _, responses = await open_tail(channel)
    first = asyncio.ensure_future(anext(responses))
    await begun(tails)
    await append_to(channel, [append_request(1), append_request(2)])
    await append_to(channel, [append_request(1), append_request(2), append_request(3)])
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
async def test_a_filter_of_tail_equals_the_same_filter_of_query(followed, filters):
    store, tails, _ = followed
    requests = [append_request(n, time_ns=n * 1_000_000, **fields) for n, fields in RECORDS.items()]
    async with following(tails, **filters) as records:
        await store.append(requests)
        last = {"model": "a", "status": "OK", "trace_id": "t3", "request_id": "same", "duration_ms": 99}
        await store.append([append_request(99, time_ns=99_000_000, **last)])
        found = [r.record async for r in store.query(Filters(QueryPayloadsRequest(**filters)), None, 1000)]
        shown = [await anext(records) for _ in found]
    assert [one.record_id for one in shown] == [one.record_id for one in reversed(found)]


async def test_a_slow_reader_misses_nothing_and_delays_no_other(followed):
    store, tails, _ = followed
    async with following(tails) as slow, following(tails) as quick:
        for n in range(1, 1001, 250):
            await store.append([append_request(m) for m in range(n, n + 250)])
            assert [m async for m in read_until(quick, n + 249)] == list(range(n, n + 250))
        assert [m async for m in read_until(slow, 1000)] == list(range(1, 1001))


async def test_what_slow_readers_have_yet_to_read_takes_no_memory(followed):
    store, tails, _ = followed
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(following(tails)) for _ in range(16)]
        for n in range(1, 21):
            await store.append([append_request(n, text="x" * MIB)])
        tracemalloc.start()
        assert all([len((await anext(records)).text) == MIB for records in slow])
        assert tracemalloc.get_traced_memory()[0] < 40 * MIB  # One record each, serialized and parsed.
        tracemalloc.stop()


async def test_a_tail_beyond_the_limit_displaces_an_idle_one_of_the_client_with_the_most(followed):
    _, tails, channel = followed
    opened = [await open_tail(channel, metadata=client("loud")) for _ in range(MAX_TAILS_OF_ONE)]
    loud = [asyncio.ensure_future(anext(responses)) for _, responses in opened]
    await until(lambda: len(tails) == MAX_TAILS_OF_ONE)
    others = [await open_tail(channel, metadata=client(f"quiet {n}")) for n in range(MAX_TAILS - MAX_TAILS_OF_ONE)]
    quiet = [asyncio.ensure_future(anext(responses)) for _, responses in others]
    await until(lambda: len(tails) == MAX_TAILS)
    _, responses = await open_tail(channel, metadata=client("late"))
    late = asyncio.ensure_future(anext(responses))
    await until(lambda: sum(one.done() for one in loud) == 1)
    _, responses = await open_tail(channel, metadata=client("loud"))
    again = asyncio.ensure_future(anext(responses))
    await until(lambda: sum(one.done() for one in loud) == 2)
    for one in loud:
        if one.done():
            with pytest.raises(OverloadedError, match="too many tails are open: a newer one replaced this one"):
                await one
    assert len(tails) == MAX_TAILS
    await append_to(channel, [append_request(7)])
    for one in (late, again, *quiet, *(one for one in loud if not one.done())):
        assert (await one).record_id == record_id(7)


async def test_a_client_beyond_its_own_limit_of_tails_displaces_its_own(followed):
    _, tails, _ = followed
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(following(tails, caller="other"))
        own = [await stack.enter_async_context(following(tails, caller="greedy")) for _ in range(MAX_TAILS_OF_ONE)]
        first_waits, *waiting = (asyncio.ensure_future(anext(records)) for records in (first, *own))
        await until(lambda: all(tail.is_waiting for tail in tails._open))
        await stack.enter_async_context(following(tails, caller="greedy"))
        with pytest.raises(OverloadedError, match="a newer one"):
            await waiting[0]
        assert not first_waits.done()
        for one in (first_waits, *waiting):
            one.cancel()
        await asyncio.gather(first_waits, *waiting, return_exceptions=True)


async def test_tails_with_stalled_readers_keep_their_places_and_others_are_refused(followed):
    tails = Tails(followed[0], max_tails=2, max_of_one=2)
    async with tails.open(NOTHING, "a"), tails.open(NOTHING, "b"):
        with pytest.raises(OverloadedError, match="0 of them of this caller; at most 2 may be"):
            async with tails.open(NOTHING, "c"):
                pass
        assert len(tails) == 2
    tails.end()
    with pytest.raises(NotReadyError, match="the logger is stopping"):
        async with tails.open(NOTHING):
            pass
