"""Callers that do not read their answers cost the logger little memory, and block no other reader."""

import asyncio
import uuid

import grpc
import pytest

from headrace.errors import OverloadedError
from headrace.rpc.server.handlers import Interceptor
from headrace_logger.read_limits import FREE_BYTES, Readers
from headrace_logger.servicer import PayloadLogServicer
from headrace_logger.store.filters import Filters
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import GetPayloadRequest, QueryPayloadsRequest
from tests.process.test_logger_store import append_request, record_id
from tests.waiting import until

MIB = 1 << 20
LARGE = 4 * MIB
UNREAD = (("grpc.max_receive_message_length", -1),)
# The window stays at 64 KiB: on any machine the connection buffers nothing beyond it that the caller does not read.
SMALL_WINDOW = (*UNREAD, ("grpc.http2.bdp_probe", 0))


def of(client):
    return (("x-headrace-client", client), ("x-headrace-policy", '{"role": "admin"}'))


class Served:
    """A logger in this process, and clients of it that read a message only on `read`."""

    def __init__(self, store, readers, target):
        self.store = store
        self.readers = readers
        self._channels = [grpc.insecure_channel(target, options) for options in (UNREAD, SMALL_WINDOW)]
        self.stub, self.unread = map(headrace_pb2_grpc.PayloadLogStub, self._channels)
        self.calls = []

    def query(self, client="c", stub=None, **filters):
        call = (stub or self.stub).Query(QueryPayloadsRequest(**filters), metadata=of(client))
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
async def served(store):
    readers = Readers(max_bytes=16 * MIB, max_readers=40, max_of_one=20, wait_s=0.5)
    server = grpc.aio.server(interceptors=(Interceptor("logger"),), options=(("grpc.max_send_message_length", -1),))
    PayloadLogServicer(store, Tails(), readers).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    one = Served(store, readers, f"127.0.0.1:{port}")
    yield one
    await asyncio.to_thread(one.close)
    await server.stop(None)


async def test_unread_large_records_take_no_more_memory_than_the_budget(served):
    await served.store.append([append_request(n, model="large", prompt="x" * LARGE) for n in range(1, 9)])
    await served.store.append([append_request(n, model="small") for n in range(9, 20)])
    for _ in range(10):
        served.query("idle", served.unread, model="large")
    await until(lambda: served.readers.lent_bytes >= LARGE)
    # Other clients' records, large or small, are read as usual from the same store.
    assert await served.read(served.query("other", model="large")) == list(range(8, 0, -1))
    # The memory of the other client's answer may not have been given back yet.
    assert LARGE <= served.readers._lent["idle"] <= 8 * MIB + 1000, "of one caller half"
    assert await served.read(served.query("idle", model="small")) == list(range(19, 8, -1))
    # A waiting call is refused, and ended calls give back their memory.
    with pytest.raises(grpc.RpcError) as caught:
        await served.read(served.query("idle", model="large"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "wait to be read by their callers" in caught.value.details()
    for call in served.calls:
        call.cancel()
    await until(lambda: served.readers.lent_bytes == 0)
    assert await served.read(served.query("idle", model="large")) == list(range(8, 0, -1))


async def test_a_record_larger_than_the_budget_can_be_read(served):
    await served.store.append([append_request(1, prompt="x" * 20 * MIB)])
    assert await served.read(served.query()) == [1]
    record = await asyncio.to_thread(served.stub.Get, GetPayloadRequest(record_id=record_id(1)))
    assert len(record.prompt) == 20 * MIB
    await until(lambda: served.readers.lent_bytes == 0)


async def test_unread_answers_of_get_are_within_the_budget_too(served):
    await served.store.append([append_request(1, request_id="r", prompt="x" * LARGE)])
    for key in ({"record_id": record_id(1)}, {"request_id": "r"}):
        record = await asyncio.to_thread(served.stub.Get, GetPayloadRequest(**key))
        assert (record.record_id, len(record.prompt), record.page_token) == (record_id(1), LARGE, "")
    assert served.readers.lent_bytes == 0


async def test_one_caller_s_many_calls_block_no_other_reader(served):
    await served.store.append([append_request(n, prompt="x" * FREE_BYTES) for n in range(1, 50)])
    idle = [served.query("idle", served.unread) for _ in range(20)]
    await until(lambda: len(served.readers._readers) == 1 and served.readers._readers["idle"] == 20)
    with pytest.raises(grpc.RpcError) as caught:
        await served.read(served.query("idle"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await served.read(served.query("other", page_size=1)) == [49]
    for call in idle[1:]:
        call.cancel()
    assert await served.read(idle[0]) == list(range(49, 0, -1))


async def test_a_search_for_text_goes_through_large_records_in_order(served):
    await served.store.append(
        [append_request(n, prompt=("needle" if n % 3 == 0 else "hay") + "x" * (n % 5) * MIB) for n in range(1, 16)]
    )
    assert await served.read(served.query(text_contains="needle")) == [15, 12, 9, 6, 3]
    assert await served.read(served.query(text_contains="needle", page_size=2)) == [15, 12]


async def test_pages_continue_among_large_and_small_records(store):
    await store.append([append_request(n, prompt="x" * (n % 4) * 50_000) for n in range(1, 60)])
    found, token = [], None
    while True:
        page = [one.record async for one in store.query(Filters(QueryPayloadsRequest()), token, 7)]
        found += [uuid.UUID(record.record_id).int for record in page]
        if len(page) < 7:
            break
        token = page[-1].page_token
    assert found == list(range(59, 0, -1))


async def test_a_loan_goes_to_a_waiting_task_and_never_to_a_cancelled_one():
    readers = Readers(max_bytes=4 * MIB)
    async with readers.lend("a", 2 * MIB), readers.lend("b", 2 * MIB):
        leaving = asyncio.ensure_future(readers._borrow("c", MIB))
        staying = asyncio.ensure_future(readers._borrow("d", MIB))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not staying.done()
    await staying
    assert readers.lent_bytes == MIB


async def test_one_caller_gets_no_more_than_half_of_the_budget():
    readers = Readers(max_bytes=4 * MIB, wait_s=0.01)
    async with readers.lend("a", 2 * MIB):
        with pytest.raises(OverloadedError):
            await readers._borrow("a", MIB)
        async with readers.lend("b", 2 * MIB), readers.lend("a", FREE_BYTES):
            pass
    assert readers.lent_bytes == 0


async def test_a_loan_to_a_cancelled_task_is_given_back():
    readers = Readers(max_bytes=2 * LARGE)

    async def borrow():
        async with readers.lend("b", 2 * LARGE):
            pass

    async with readers.lend("a", LARGE):
        waiting = asyncio.create_task(borrow())
        await asyncio.sleep(0)
        waiting.cancel()  # The loan is given back before the task runs again.
    await asyncio.gather(waiting, return_exceptions=True)
    assert readers.lent_bytes == 0
