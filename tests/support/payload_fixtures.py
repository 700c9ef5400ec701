"""Fixtures of the payload log, for the conftest of each folder that uses them."""

import grpc
import pytest
from pydantic import SecretStr

from headrace.rpc.client.channel import open_channel
from headrace.rpc.server.handlers import Interceptor
from headrace_logger.servicer import PayloadLogServicer
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc
from tests.support import postgresql as postgresql_server
from tests.support.payload_ingest import Taps, listening

# For tests that look into the file.
only_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def on_both_databases(metafunc, modules, full):
    """Parametrizes the tests of some modules that take `store`; for `pytest_generate_tests`.

    Those of the modules in `full` take PostgreSQL with FULL=1 only.
    """
    name = metafunc.module.__name__.rpartition(".")[2]
    chosen = name in modules | full and "store" in metafunc.fixturenames
    if chosen and not any("store" in mark.args[:1] for mark in metafunc.definition.iter_markers("parametrize")):
        marks = pytest.mark.full if name in full else ()
        metafunc.parametrize("store", ["sqlite", pytest.param("postgresql", marks=marks)], indirect=True)


@pytest.fixture(scope="session")
def postgresql():
    """A server that the tests of this process share; none stops it."""
    with postgresql_server.running() as server:
        yield server


@pytest.fixture
async def store(request, tmp_path):
    """A store in SQLite; of tests that `on_both_databases` parametrizes, in PostgreSQL too."""
    if getattr(request, "param", "sqlite") == "sqlite":
        store = Store(tmp_path / "payloads.sqlite3")
    else:
        store = Store(SecretStr(request.getfixturevalue("postgresql").database()))
    yield store
    await store.close()


@pytest.fixture
async def payload_log(store):
    """A stub of the logger's public service, which reads `store`."""
    server = grpc.aio.server(interceptors=(Interceptor("logger"),))
    PayloadLogServicer(store, Tails()).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "logger") as channel:
        yield headrace_pb2_grpc.PayloadLogStub(channel)
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
