"""Numba and Triton are optional: a machine with a GPU may lack the one, any other the other."""

import subprocess
import sys

_LOAD = (
    "import sys; sys.modules |= dict.fromkeys(('numba', 'llvmlite', 'triton')); import headrace_predictor.engine.build"
)


def test_what_builds_an_engine_can_be_imported_without_them():
    subprocess.run((sys.executable, "-c", _LOAD), check=True)
