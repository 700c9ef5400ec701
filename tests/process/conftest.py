"""Fixtures of the payload log, and the gateway before fakes that tests of several files share."""

import pytest_asyncio

from tests.process.gateway_before_fakes import running_gateway
from tests.support.payload_fixtures import ingest, on_both_databases, payload_log, postgresql, store, taps

__all__ = ["ingest", "payload_log", "postgresql", "store", "taps"]


@pytest_asyncio.fixture(scope="session")
async def gateway(tmp_path_factory):
    """Envoy with a fake behind each cluster; a test leaves it as it was."""
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def pytest_generate_tests(metafunc):
    # What the databases do differently: searches, sizes, sums. The others share all but the statements of these.
    on_both_databases(
        metafunc, ("test_logger_store", "test_logger_retention"), ("test_logger_reading", "test_logger_gateway_calls")
    )
