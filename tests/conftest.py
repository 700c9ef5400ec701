"""Settings of every test and of the processes that it starts.

A service that a test starts has no page of metrics, whose port another test may have. Torch has one thread: the tests
run side by side, and threads of small products spin on the cores of the others. Services of whole stacks are forks of
processes that have imported torch once, and so are the loggers and predictors that tests start alone: see
tests/support/forkserver.py. The container tests, README's commands, those of `headrace` and test_startup_errors start
them as users do.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from headrace_runner import process
from tests.support import forkserver
from tests.support.full import FULL

if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # Until all tests are imported: collections are a tenth of that time, or more.
os.environ |= {f"{prefix}_METRICS_PORT": "0" for prefix in ("PREDICTOR", "TRANSFORMER", "LOGGER")}
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it as it is imported.

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `full` run with FULL=1 only. The files of each folder are spread over the run: some wait, others
    compute, and side by side they take the least time."""
    if not FULL:
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    folders: dict[Path, dict[Path, None]] = {}
    for item in items:
        folders.setdefault(item.path.parent, {})[item.path] = None
    # The last files are those of a large folder, which are short.
    places = {path: place / (len(files) + 4) for files in folders.values() for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """The garbage collector ignores the objects of imports, which are most of all objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
