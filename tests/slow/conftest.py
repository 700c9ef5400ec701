"""The system tests' stacks, for the slow tests."""

from tests.system.conftest import new_stack, pytest_runtest_makereport, stack

__all__ = ["new_stack", "pytest_runtest_makereport", "stack"]
