"""Fixtures of the payload log, for the conftest of each folder that uses them."""

import grpc
import pytest

from millrace.rpc.channel import open_channel
from millrace.rpc.handlers import CallInterceptor
from millrace_protos import millrace_pb2_grpc
from services.logger.servicer import PayloadLogServicer
from services.logger.store.store import SqliteStore
from services.logger.tails import Tails
from tests.support.payload_ingest import Taps, listening


@pytest.fixture
async def store(tmp_path):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    yield store
    await store.close()


@pytest.fixture
async def payload_log(store):
    """A stub of the logger's public service, which reads `store`."""
    server = grpc.aio.server(interceptors=(CallInterceptor("logger"),))
    PayloadLogServicer(store, Tails()).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "logger") as channel:
        yield millrace_pb2_grpc.PayloadLogStub(channel)
    await server.stop(None)


@pytest.fixture
async def ingest():
    async with listening() as ingest:
        yield ingest


@pytest.fixture
async def taps(tmp_path):
    taps = Taps(tmp_path / "spool")
    yield taps
    await taps.close_all()
