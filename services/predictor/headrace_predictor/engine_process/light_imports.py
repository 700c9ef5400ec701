"""Imports transformers without torch's compiler, torch's tensors on several machines, and SciPy's optimizers.

transformers takes from them decorators, placements and losses of training, which an engine process never uses. They
were a third of the processor's time of a host's start.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from typing import Any

_COMPILER = "torch._dynamo"


@contextmanager
def light_imports() -> Iterator[None]:
    """For a process that compiles nothing by torch: what is decorated meanwhile says nothing to the compiler."""
    from transformers import utils

    for module in (utils, utils.import_utils):
        vars(module).update(is_torch_distributed_available=_never, is_scipy_available=_never)
    if _COMPILER in sys.modules or (spec := find_spec(_COMPILER)) is None:
        yield
        return
    # Its submodules can be imported, but not its own code, which imports all of them.
    package: Any = module_from_spec(spec)
    package.__getattr__ = _decorator
    sys.modules[_COMPILER] = package
    try:
        yield
    finally:
        del sys.modules[_COMPILER]


def _decorator(name: str) -> Any:
    if name.startswith("__"):  # Which the import system looks for.
        raise AttributeError(name)
    return _unchanged


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unchanged if function is None else function


def _never() -> bool:
    return False
