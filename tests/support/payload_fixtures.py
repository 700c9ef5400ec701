"""Fixtures of the payload log, for the conftest of each folder that uses them."""

import pytest
from pydantic import SecretStr

from headrace.rpc.client.channel import open_channel
from headrace_logger.servicer import PayloadLogServicer
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc
from tests.support import postgresql as postgresql_server
from tests.support.full import usually
from tests.support.payload_ingest import Taps, listening
from tests.support.payload_records import serving

BOTH = ("sqlite", "postgresql")
# For tests that look into the file.
only_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def on_both_databases(metafunc, usual, others):
    """Parametrizes the tests of some modules that take `store`, of `others` with PostgreSQL in the long form only."""
    module = metafunc.module.__name__.rpartition(".")[2]
    chosen = module in (*usual, *others) and "store" in metafunc.fixturenames
    if chosen and not any("store" in mark.args[:1] for mark in metafunc.definition.iter_markers("parametrize")):
        databases = BOTH if module in usual else usually(("sqlite",), BOTH)
        metafunc.parametrize("store", databases, indirect=True)


@pytest.fixture(scope="session")
def postgresql():
    """A server that the tests of this process share; none stops it."""
    with postgresql_server.running() as server:
        yield server


@pytest.fixture
async def store(request, tmp_path):
    """A store in SQLite; of tests that `on_both_databases` parametrizes, in PostgreSQL too."""
    is_sqlite = getattr(request, "param", "sqlite") == "sqlite"
    database = tmp_path / "payloads.sqlite3" if is_sqlite else request.getfixturevalue("postgresql").emptied()
    store = Store(database if is_sqlite else SecretStr(database))
    yield store
    await store.close()


@pytest.fixture
async def payload_log(store):
    """A stub of the logger's public service, which reads `store`."""
    async with serving(PayloadLogServicer(store, Tails(store))) as target, open_channel(target, "logger") as channel:
        yield headrace_pb2_grpc.PayloadLogStub(channel)


@pytest.fixture
async def ingest():
    async with listening() as ingest:
        yield ingest


@pytest.fixture
async def taps(tmp_path):
    taps = Taps(tmp_path / "spool")
    yield taps
    await taps.close_all()
