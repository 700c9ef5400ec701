"""Benchmarks: measured side by side, never part of the tests."""
