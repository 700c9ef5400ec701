"""torch's kernels in Python for tensors without data ("meta"), which are a third of its import and import SymPy.

Nearly all models are made with the kernels in C++ alone. An engine host defers the others (host.py's `light_imports`),
and a model that needs them imports them.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

META_KERNELS = "torch._meta_registrations"


def do_without() -> None:
    """Does once what torch does beside, while it imports the kernels that have been deferred."""
    import torch

    if not _are_there():
        torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


def with_meta_kernels(make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls `make`, again with the deferred kernels if it fails without."""
    try:
        return make(*arguments, **named)
    except RuntimeError:
        if _are_there():
            raise
        sys.modules[META_KERNELS].activate_meta  # noqa: B018  # Which imports them.
        return make(*arguments, **named)


def _are_there() -> bool:
    return "activate_meta" in vars(sys.modules[META_KERNELS])
