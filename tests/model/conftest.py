"""Engines with fake models, and a host of engine processes; kernels are compiled once for all workers."""

import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.engine_process.host import light_imports

# As hosts of engines import them, in half of the time; this module is imported before those of any test.
with light_imports():
    import tests.random_encoders  # noqa: F401
from tests.model.fakes import engines
from tests.support.compile_once import install
from tests.support.forkserver import fork_engine_host

# A decoder's program takes half a minute to compile, on a busy machine more, in the first test that needs it. A limit
# that ends meanwhile would end the process, as every error in a thread of the decoder does.
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


install()


@pytest.fixture
def engine_of():
    with engines() as make:
        yield make


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock, which a test moves. The watchdog of its steps has another."""
    now = [1000.0]
    fake = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
    for module in ("engine", "publisher", "state.sequence"):
        monkeypatch.setattr(f"headrace_predictor.engine.{module}.time", fake)
    return now


class SharedHost(EngineHost):
    """A host that several repositories use, one after the other."""

    def _start(self) -> socket.socket:
        """Starting one takes 6 s of a core, for imports."""
        self._control, theirs = socket.socketpair()
        with theirs:
            self.pid = fork_engine_host(theirs)
        return self._control

    async def close(self) -> None:
        """Keeps the host for the next repository."""

    async def end(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="session")
async def engine_host() -> AsyncIterator[SharedHost]:
    """All tests of this process share it."""
    host = SharedHost()
    yield host
    await host.end()


@pytest.fixture
def slow_models(engine_host, monkeypatch):
    """A step takes 20 ms in engine processes that start now: 200 tokens outlast a test on every machine."""
    monkeypatch.setattr(engine_host, "prepare", "tests.system.faulty_predictor:prepare")
