"""What holds for every test, and for the processes that it starts.

A service that it starts by itself has no Prometheus page, whose port others may have. Torch has one thread: the tests
run side by side, and threads of small products spin on the cores of the others.
"""

import os

os.environ |= {f"{prefix}_METRICS_PORT": "0" for prefix in ("PREDICTOR", "TRANSFORMER", "LOGGER")}
os.environ.setdefault("OMP_NUM_THREADS", "1")
