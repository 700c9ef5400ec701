"""Real stacks, for the fuzz tests."""

from tests.support.stacks import pytest_runtest_makereport, stacks

__all__ = ["pytest_runtest_makereport", "stacks"]
