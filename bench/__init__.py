"""Benchmarks: comparative measurements, never part of the tests."""
