"""Real stacks for the system tests: one shared, and as many of one's own as a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from runner.envoy_config import Change
from runner.free_ports import start_stack
from runner.stack import Stack

_LOG_LINES = 40

StackFactory = Callable[..., Awaitable[Stack]]

_running: list[Stack] = []


@pytest_asyncio.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The bundled models behind one predictor; shared by every test of this process."""
    started = await _start(tmp_path_factory.mktemp("stack"), {})
    yield started
    await _stop(started)


@pytest_asyncio.fixture
async def new_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StackFactory]:
    """Makes stacks that end with the test: `await new_stack(predictors=2, environment={"predictor": {…}})`.

    Keywords are fields of StackSettings, but for `environment`, `commands` and `change_gateway`, which are Stack's.
    """
    own: list[Stack] = []

    async def start(
        *,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        commands: Mapping[str, tuple[str, ...]] | None = None,
        change_gateway: Change | None = None,
        **overrides: Any,
    ) -> Stack:
        folder = tmp_path_factory.mktemp("stack")
        arguments = {"environment": environment, "commands": commands, "change_gateway": change_gateway}
        own.append(await _start(folder, overrides, **arguments))
        return own[-1]

    yield start
    for started in own:
        await _stop(started)


async def _start(folder: Path, overrides: dict[str, Any], **arguments: Any) -> Stack:
    started = await start_stack(folder, overrides, **arguments)
    _running.append(started)
    return started


async def _stop(started: Stack) -> None:
    _running.remove(started)
    await started.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attaches the end of each process's log to a failed test."""
    report = yield
    if report.failed and {"stack", "new_stack"} & set(getattr(item, "fixturenames", ())):
        for running in _running:
            for name in running.names:
                lines = running.log(name).splitlines()[-_LOG_LINES:]
                report.sections.append((f"{name} of {running.gateway}", "\n".join(lines)))
    return report
