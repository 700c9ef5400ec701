"""What holds for every test, and for the processes that it starts.

A service that it starts by itself has no Prometheus page, whose port others may have. Torch has one thread: the tests
run side by side, and threads of small products spin on the cores of the others.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ |= {f"{prefix}_METRICS_PORT": "0" for prefix in ("PREDICTOR", "TRANSFORMER", "LOGGER")}
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The time of an example says how busy the machine is.
settings.register_profile("millrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millrace")

# The files that take longest, longest first: with two workers, the last file to begin decides when a run ends.
LONGEST = (
    "system/test_roll",
    "system/test_resume",
    "scenarios/test_resume",
    "fuzz/test_neighbours",
    "system/test_drain",
    "scenarios/test_concurrent_streams",
    "scenarios/test_payload_log",
    "system/test_traces",
    "system/test_weights",
    "system/test_readme",
    "system/test_collector_away",
    "scenarios/test_overload",
    "system/test_smoke",
    "scenarios/test_bad_request",
    "scenarios/test_logged_stream",
    "fuzz/test_fuzz",
    "system/test_playground",
    "scenarios/test_decoupled",
    "system/test_hot_restart",
    "system/test_prometheus",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; within a file nothing changes."""
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.with_suffix("").parts[-2:]), len(place)))
