"""Fixtures of the payload log."""

from tests.support.payload_fixtures import ingest, on_both_databases, payload_log, postgresql, store, taps

__all__ = ["ingest", "payload_log", "postgresql", "store", "taps"]

_STORES = {f"test_logger_{name}" for name in ("store", "usage", "retention", "clients", "gateway_calls")}
_ABOVE_THE_STORE = {"test_logger_readers", "test_logger_sinks_runner"}  # What they ask of it is in test_logger_store.


def pytest_generate_tests(metafunc):
    on_both_databases(metafunc, _STORES, full=_ABOVE_THE_STORE)
