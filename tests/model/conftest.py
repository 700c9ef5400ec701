"""Engines with fake models, and a host of engine processes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace_predictor.engine_process.engine_host import EngineHost
from tests.model.fakes import engines


@pytest.fixture
def engine_of():
    with engines() as make:
        yield make


class SharedHost(EngineHost):
    """A host that several repositories use, one after the other."""

    async def close(self) -> None:
        """Keeps the host for the next repository."""

    async def end(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="session")
async def engine_host() -> AsyncIterator[SharedHost]:
    """Starting one takes seconds: all tests of this process share it."""
    host = SharedHost()
    yield host
    await host.end()
