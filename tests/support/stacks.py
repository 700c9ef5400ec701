"""Real stacks for the tests: a pool of running ones by their settings, and new ones for single tests.

The conftest.py of each folder whose tests use stacks imports the fixtures from here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack

_OF_STACK = ("environment", "commands", "change_gateway")
_IDLE = 2  # This many stacks without a user stay up; each has four processes or more.
_LOG_LINES = 40

StackFactory = Callable[..., Awaitable[Stack]]


@dataclass
class _Pooled:
    stack: Stack
    users: int = 0  # Now.
    uses: int = 0


class StackPool:
    """The running stacks of one test process, by their settings.

    `settings` are fields of StackSettings, except `environment`, `commands` and `change_gateway`, which are Stack's.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.running: list[Stack] = []
        self._folders = folders
        self._pooled: dict[str, _Pooled] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, **settings: Any) -> AsyncIterator[Stack]:
        """A stack with these settings, which other tests share: it must be left unchanged."""
        key = repr(sorted(settings.items()))
        if key not in self._pooled:
            self._pooled[key] = _Pooled(await self.start(settings))
        pooled = self._pooled[key]
        pooled.users += 1
        pooled.uses += 1
        try:
            yield pooled.stack
        finally:
            pooled.users -= 1
            self.stop_idle(_IDLE)

    def stop_idle(self, keep: int = 0) -> None:
        """Stops the stacks without a user, except the `keep` that were used most often, while the next tests run."""
        idle = [key for key, pooled in self._pooled.items() if not pooled.users]
        idle.sort(key=lambda key: self._pooled[key].uses)
        for key in idle[: max(0, len(idle) - keep)]:
            self._stopping.add(asyncio.create_task(self.stop(self._pooled.pop(key).stack)))

    async def close(self) -> None:
        """Stops the stacks without a user; returns when they have ended."""
        self.stop_idle()
        await asyncio.gather(*self._stopping)

    async def start(self, settings: dict[str, Any]) -> Stack:
        """A new stack, of which the caller disposes with `stop`. Raises StartupError."""
        arguments = {name: settings[name] for name in _OF_STACK if name in settings}
        fields = {name: value for name, value in settings.items() if name not in _OF_STACK}
        started = await start_stack(self._folders.mktemp("stack"), fields, **arguments)
        self.running.append(started)
        return started

    async def stop(self, stack: Stack) -> None:
        """Stops a stack of `start`."""
        self.running.remove(stack)
        await stack.stop()


@pytest_asyncio.fixture(scope="session")
async def stacks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StackPool]:
    """The pool: `async with stacks.use(models=…, predictors=2) as stack`."""
    pool = StackPool(tmp_path_factory)
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module")
async def stack(stacks: StackPool) -> AsyncIterator[Stack]:
    """The bundled models behind one predictor."""
    async with stacks.use() as shared:
        yield shared


@pytest_asyncio.fixture
async def mended_stack(stacks: StackPool) -> AsyncIterator[Stack]:
    """The storyteller behind one predictor, for tests that end its processes: all run again when a test begins."""
    async with stacks.use(models="storyteller=models/storyteller") as shared:
        await shared.wait_ready()
        yield shared


@pytest_asyncio.fixture
async def new_stack(stacks: StackPool) -> AsyncIterator[StackFactory]:
    """Makes stacks that end with the test, for tests that damage them permanently: `await new_stack(predictors=2)`."""
    own: list[Stack] = []

    async def start(**settings: Any) -> Stack:
        own.append(await stacks.start(settings))
        return own[-1]

    yield start
    for started in own:
        await stacks.stop(started)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attaches the end of each process's log to a failed test."""
    report = yield
    pool = getattr(item, "funcargs", {}).get("stacks")
    if report.failed and isinstance(pool, StackPool):
        for running in pool.running:
            for name in running.names:
                lines = running.log(name).splitlines()[-_LOG_LINES:]
                report.sections.append((f"{name} of {running.gateway}", "\n".join(lines)))
    return report
