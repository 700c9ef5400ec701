"""The system tests' stacks, for the scenarios, and which of these need FULL=1."""

import os

from tests.system.conftest import new_stack, pytest_runtest_makereport, stack

__all__ = ["new_stack", "pytest_runtest_makereport", "stack"]


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked `full`, unless that is asked for."""
    if os.environ.get("FULL") != "1":
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
