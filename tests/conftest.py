"""Settings of every test and of the processes that it starts.

A service that a test starts has no page of metrics, whose port another test may have. Torch has one thread: the tests
run side by side, and threads of small products spin on the cores of the others. Services of whole stacks are forks of
processes that have imported torch once, and so are the loggers and predictors that tests start alone: see
tests/support/forkserver.py. The container tests and README's commands start them as users do.
"""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from headrace_runner import process
from tests.support import forkserver
from tests.support.full import FULL

os.environ |= {f"{prefix}_METRICS_PORT": "0" for prefix in ("PREDICTOR", "TRANSFORMER", "LOGGER")}
os.environ.setdefault("OMP_NUM_THREADS", "1")

process.spawn = forkserver.spawn

# A run in the background ignores these signals, and its processes would inherit that.
for signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.SIG_DFL)

# The duration of an example depends on the load of the machine. Each run has other examples, except in CI, where a
# failure must come again.
settings.register_profile(
    "headrace",
    derandomize=False,
    max_examples=100 if FULL else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("headrace"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "headrace")

# The longest files, longest first: with two workers, the last file to begin decides when a run ends.
LONGEST = (
    "slow/test_resume_under_load",
    "slow/test_roll",
    "slow/test_neighbours",
    "system/test_readme",
    "system/test_resume",
    "system/test_traces",
    "system/test_playground",
    "fuzz/test_fuzz",
    "system/test_smoke",
    "system/test_prometheus",
    "system/test_error_table",
    "system/test_headrace_command",
    "system/test_repository",
    "scenarios/test_bad_request",
    "conformance/test_clients",
    "system/test_payload_records",
    "system/test_replicas",
    "system/test_drain",
    "scenarios/test_payload_log",
    "scenarios/test_idle_gaps",
    "scenarios/test_big_tensors",
    "scenarios/test_concurrent_streams",
    "scenarios/test_decoupled",
    "process/test_payload_shipper",
    "process/test_request_memory",
    "process/test_runner_stack",
    "process/test_transformer_workers",
    "process/test_body_processes",
    "process/test_transformer_event_loop",
    "process/test_server",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, files that share a stack one after the other; within a file nothing changes.

    Tests marked `full` run with FULL=1 only.
    """
    if not FULL:
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    place = {name: at for at, name in enumerate(LONGEST)}
    shared = {item.path for item in items if _takes_usual_stack(item)}
    items.sort(
        key=lambda item: (place.get("/".join(item.path.with_suffix("").parts[-2:]), len(place)), item.path in shared)
    )


def _takes_usual_stack(item: pytest.Item) -> bool:
    """Whether the test uses the pool's stack with the bundled models, and its module no other stack."""
    module = getattr(item, "module", None)
    return "stack" in getattr(item, "fixturenames", ()) and not hasattr(module, "stack")


def pytest_collection_finish() -> None:
    """The garbage collector ignores the objects of imports, which are most of all objects."""
    gc.collect()
    gc.freeze()
