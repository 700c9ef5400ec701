"""What the host imports before it forks, what its forks can still import, and what an engine does without."""

import subprocess
import sys

import pytest

_IMPORT = """
import sys
from headrace_predictor.engine_process.host import import_libraries
import_libraries()
"""
_CHECK = "assert not {'torch._dynamo', 'torch.distributed.tensor', 'scipy.optimize'} & sys.modules.keys()"
_COMPILE = "import torch; assert 'inductor' in torch.compiler.list_backends()"


@pytest.mark.parametrize("then", [_CHECK, _COMPILE], ids=["without what is slow to import", "torch still compiles"])
def test_the_host_imports_what_engines_need(then):
    subprocess.run((sys.executable, "-c", _IMPORT + then), check=True, timeout=300)


_LOAD = (
    "import sys; sys.modules |= dict.fromkeys(('numba', 'llvmlite', 'triton')); import headrace_predictor.engine.build"
)


def test_what_builds_an_engine_can_be_imported_without_them():
    subprocess.run((sys.executable, "-c", _LOAD), check=True)
