"""Real stacks, for the scenarios."""

from tests.support.stacks import new_stack, pytest_runtest_makereport, stack, stacks

__all__ = ["new_stack", "pytest_runtest_makereport", "stack", "stacks"]
