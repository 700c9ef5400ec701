"""Engines with fake models, and a host of engine processes; kernels are compiled once for all workers."""

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from headrace_predictor.engine_process.engine_host import EngineHost
from tests.model.fakes import engines

try:
    from numba.core.dispatcher import Dispatcher
except ImportError:  # It is optional: a GPU needs none.
    Dispatcher = None

# A decoder's program takes a minute to compile, on a busy machine several, in the first test that needs it. A limit
# that ends meanwhile would end the process, as every error in a thread of the decoder does.
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


class CompileOnce:
    """Of processes that need the same kernel one compiles it; the others wait for it and find it in numba's cache."""

    def __init__(self, compile_: Any) -> None:
        self._compile, self._lock, self._depth = compile_, threading.RLock(), 0
        self._file = os.open(Path(tempfile.gettempdir()) / "headrace-tests-kernels.lock", os.O_RDWR | os.O_CREAT)

    def __call__(self, dispatcher: Any, signature: Any) -> Any:
        with self._lock:
            if self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._depth += 1
            try:
                return self._compile(dispatcher, signature)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)


if Dispatcher is not None:
    compile_once = CompileOnce(Dispatcher.compile)
    # A method: its first argument is the dispatcher.
    Dispatcher.compile = lambda *arguments: compile_once(*arguments)


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


@pytest.fixture
def slow_models(engine_host, monkeypatch):
    """A step takes 20 ms in engine processes that start now: 200 tokens outlast a test on every machine."""
    monkeypatch.setattr(engine_host, "prepare", "tests.system.slow_predictor:prepare")
