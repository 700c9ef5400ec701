"""Fixtures of the payload log."""

from tests.support.payload_fixtures import ingest, payload_log, store, taps

__all__ = ["ingest", "payload_log", "store", "taps"]
