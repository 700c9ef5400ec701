"""What the host imports before it forks, and what its forks can still import."""

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
