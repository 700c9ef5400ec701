"""The predictor: token ids in, token ids out."""

import os

from headrace import plugins  # noqa: F401  # First.

# OpenMP threads that spin while they wait starve everything else on shared cores (measured: a step of
# 72 ms took 409 ms). OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
