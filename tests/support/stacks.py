"""Real stacks for the tests of a file, and for single tests.

The conftest.py of each folder whose tests use stacks imports the fixtures from here.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack

_OF_STACK = ("environment", "commands", "change_gateway")
_LOG_LINES = 40

StackFactory = Callable[..., Awaitable[Stack]]


class Stacks:
    """The running stacks of one test process.

    `settings` are fields of StackSettings, except `environment`, `commands` and `change_gateway`, which are Stack's.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.running: list[Stack] = []
        self._folders = folders

    @asynccontextmanager
    async def use(self, **settings: Any) -> AsyncIterator[Stack]:
        """A stack with these settings. No later test shares it: idle for half a minute, it costs as much as a start."""
        started = await self.start(settings)
        try:
            yield started
        finally:
            await self.stop(started)

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


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    """`async with stacks.use(models=…, predictors=2) as stack`."""
    return Stacks(tmp_path_factory)


@pytest_asyncio.fixture(scope="module")
async def stack(stacks: Stacks) -> AsyncIterator[Stack]:
    """The bundled models behind one predictor."""
    async with stacks.use() as shared:
        yield shared


@pytest_asyncio.fixture
async def new_stack(stacks: Stacks) -> AsyncIterator[StackFactory]:
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
    if report.failed and isinstance(pool, Stacks):
        for running in pool.running:
            for name in running.names:
                lines = running.log(name).splitlines()[-_LOG_LINES:]
                report.sections.append((f"{name} of {running.gateway}", "\n".join(lines)))
    return report
