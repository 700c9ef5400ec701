"""What the host imports before it forks, what its forks can still import, and what an engine does without."""

import subprocess
import sys

_IMPORT = """
import sys
from headrace_predictor.engine_process.host import import_libraries
import_libraries()
"""
# Without what is slow to import, all of which is still there.
_CHECK = """
import torch, transformers
assert not {'torch._dynamo', 'torch.distributed.tensor', 'scipy.optimize', 'scipy.linalg'} & sys.modules.keys()
# The code of these has not run: it does where somebody takes a name from it.
for module, name in ((transformers, 'GPT2Config'), (transformers.models, 'GPT2Model'), (torch.export, 'export')):
    assert name not in vars(module) and getattr(module, name).__name__ == name
assert 'inductor' in torch.compiler.list_backends()
import scipy.linalg
"""


def test_the_host_imports_what_engines_need():
    subprocess.run((sys.executable, "-c", _IMPORT + _CHECK), check=True)


_LOAD = """
import sys
from headrace_predictor.engine_process.host import light_imports
sys.modules |= dict.fromkeys(('numba', 'llvmlite', 'triton'))
with light_imports():
    import headrace_predictor.engine.build
"""


def test_what_builds_an_engine_can_be_imported_without_them():
    subprocess.run((sys.executable, "-c", _LOAD), check=True)
