"""Unit tests start nothing: what imports a model library, opens a socket or starts a process fails here.

`tests/model` is for what computes with torch or reads a tokenizer, `tests/process` for what listens or starts one
process.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.payload_fixtures import store
from tests.unit.guard import Guard, guard

__all__ = ["store"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with guard:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with guard:
        return (yield)


@pytest.fixture(autouse=True)
def refusals() -> Generator[Guard, None, None]:
    """The guard; what it refused fails the test, even where the code under test survived the refusal."""
    yield guard
    refused = guard.take()
    assert not refused, f"not for tests/unit: {', '.join(refused)}"
