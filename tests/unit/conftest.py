"""What several of the unit tests need of the payload log."""

import pytest

from services.logger.store import SqliteStore
from tests.unit.payload_ingest import Taps, listening


@pytest.fixture
async def store(tmp_path):
    store = SqliteStore(tmp_path / "payloads.sqlite3")
    yield store
    await store.close()


@pytest.fixture
async def ingest():
    async with listening() as ingest:
        yield ingest


@pytest.fixture
async def taps(tmp_path):
    taps = Taps(tmp_path / "spool")
    yield taps
    await taps.close_all()
