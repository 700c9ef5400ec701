"""Fixtures of the payload log."""

from tests.support.payload_fixtures import ingest, on_both_databases, payload_log, postgresql, store, taps

__all__ = ["ingest", "payload_log", "postgresql", "store", "taps"]


def pytest_generate_tests(metafunc):
    on_both_databases(metafunc, {f"test_logger_{name}" for name in ("store", "retention", "reading", "gateway_calls")})
