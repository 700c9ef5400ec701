"""Unit tests start nothing: a test that imports a model library, opens a socket or starts a process fails.

Tests that compute with torch or read a tokenizer are in `tests/model`, those that listen or start a process in
`tests/process`.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.support.payload_fixtures import store
from tests.unit.guard import Guard, guard

__all__ = ["store"]


def guarded(node: pytest.Item | pytest.Collector) -> AbstractContextManager[object]:
    """The guard for items of this folder: pytest calls these hooks for every other folder of the run too."""
    return guard if node.path.is_relative_to(Path(__file__).parent) else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with guarded(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with guarded(item):
        return (yield)


@pytest.fixture(autouse=True)
def refusals() -> Generator[Guard, None, None]:
    """The guard; whatever it refused fails the test, even if the code under test survived the refusal."""
    yield guard
    refused = guard.take()
    assert not refused, f"not for tests/unit: {', '.join(refused)}"
