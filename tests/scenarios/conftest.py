"""Real stacks, for the scenarios."""

from tests.support.stacks import mended_stack, new_stack, pytest_runtest_makereport, stack, stacks

__all__ = ["mended_stack", "new_stack", "pytest_runtest_makereport", "stack", "stacks"]
