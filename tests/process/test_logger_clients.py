"""A client reads, follows and deletes only its own records; admins, and all callers without keys, have all of them."""

import asyncio
import base64
import uuid

import grpc
import pytest

from headrace.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from headrace.rpc.client.channel import open_channel
from headrace.rpc.server.handlers import Interceptor
from headrace_logger.servicer import PayloadLogServicer
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import (
    DeletePayloadsRequest,
    GetPayloadRequest,
    QueryPayloadsRequest,
    TailPayloadsRequest,
    UsageRequest,
)
from tests.process.test_logger_store import append_request, numbers, record_id
from tests.support.payload_fixtures import only_sqlite

ANN = (("x-headrace-client", "ann"), ("x-headrace-policy", "{}"))
ADMIN = (("x-headrace-client", "root"), ("x-headrace-policy", '{"role": "admin"}'))
NONE = ()


@pytest.fixture
async def served(store):
    """The service and its tails: odd records are ann's, even ones bob's."""
    tails = Tails()
    server = grpc.aio.server(interceptors=(Interceptor("logger"),))
    PayloadLogServicer(store, tails).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "logger") as channel:
        await store.append([of(n) for n in range(1, 7)])
        yield headrace_pb2_grpc.PayloadLogStub(channel), tails
    await server.stop(None)


def of(number, **fields):
    client = "ann" if number % 2 else "bob"
    return append_request(number, **{"client": client, "request_id": "same", "time_ns": number * 1000, **fields})


async def found(stub, metadata, **filters):
    records = stub.Query(QueryPayloadsRequest(**filters), metadata=metadata)
    return [uuid.UUID(record.record_id).int async for record in records]


@pytest.mark.parametrize(
    ("metadata", "filters", "expected"),
    [
        (ANN, {}, [5, 3, 1]),
        (ANN, {"client": "ann"}, [5, 3, 1]),
        (ANN, {"request_id": "same"}, [5, 3, 1]),
        (ADMIN, {}, [6, 5, 4, 3, 2, 1]),
        (ADMIN, {"client": "bob"}, [6, 4, 2]),
        (NONE, {"client": "bob"}, [6, 4, 2]),
    ],
)
async def test_a_query_finds_only_records_that_its_caller_may_read(served, metadata, filters, expected):
    assert await found(served[0], metadata, **filters) == expected


@pytest.mark.parametrize("client", ["bob", "nobody", ""])
async def test_another_client_s_name_is_refused_whether_it_exists_or_not(served, client):
    stub, _ = served
    for call in (
        lambda: anext(aiter(stub.Query(QueryPayloadsRequest(client=client), metadata=ANN))),
        lambda: anext(aiter(stub.Tail(TailPayloadsRequest(client=client), metadata=ANN))),
        lambda: stub.Usage(UsageRequest(client=client), metadata=ANN),
    ):
        with pytest.raises(ForbiddenError, match="ann may read and delete only its own records"):
            await call()
    with pytest.raises(ForbiddenError):
        await stub.Delete(DeletePayloadsRequest(client=client or "-"), metadata=ANN)


async def test_another_client_s_record_is_not_found(served):
    stub, _ = served
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
    stub, _ = served
    pages, token = [], None
    while page := [r async for r in stub.Query(QueryPayloadsRequest(page_size=1, page_token=token), metadata=ANN)]:
        token = page[0].page_token
        packed = base64.urlsafe_b64decode(token + "==")
        # A version, the record's time and its id.
        assert packed[1:] == page[0].time.ToMicroseconds().to_bytes(8, "big") + uuid.UUID(page[0].record_id).bytes
        pages.append(uuid.UUID(page[0].record_id).int)
    assert pages == [5, 3, 1]


async def test_a_page_continues_after_a_record_that_was_deleted_meanwhile(store, served):
    stub, _ = served
    (first,) = [r async for r in stub.Query(QueryPayloadsRequest(page_size=1), metadata=ANN)]
    await store.delete(record_id=first.record_id)
    assert await found(stub, ANN, page_token=first.page_token) == [3, 1]


async def test_a_tail_shows_its_client_s_records(store, served):
    stub, tails = served
    call = stub.Tail(TailPayloadsRequest(), metadata=ANN)
    responses = aiter(call)
    reading = asyncio.ensure_future(anext(responses))
    await call.initial_metadata()
    tails.show(await store.append([of(8), of(10), of(11)]))
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
    assert (await served[0].Delete(DeletePayloadsRequest(**key), metadata=ANN)).deleted == deleted
    assert await numbers(store) == left


@only_sqlite
async def test_a_client_s_deletion_covers_its_own_late_records_and_no_other_s(store, served, tmp_path):
    stub, _ = served
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


async def test_a_malformed_policy_refuses_the_call(served):
    with pytest.raises(UnauthenticatedError):
        await found(served[0], (("x-headrace-client", "ann"), ("x-headrace-policy", "{")))
