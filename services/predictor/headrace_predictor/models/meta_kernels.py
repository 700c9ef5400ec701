"""torch's kernels in Python for tensors without data ("meta"), which are a third of its import and import SymPy.

Nearly all models are made without them. An engine host defers them (`light_imports`), until a model fails.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

META_KERNELS = "torch._meta_registrations"
REFERENCES = "torch._refs"  # They import it; `torch.broadcast_shapes` uses it.
_own: list[Any] = []  # The registration of a kernel here.


def do_without(torch: Any) -> None:
    """Does once what torch does beside while it imports the kernels, if they have been deferred."""
    if _own or "activate_meta" in vars(sys.modules[META_KERNELS]):
        return

    def where(condition: Any, one: Any, other: Any) -> Any:
        return torch.empty((condition * one * other).shape, dtype=torch.result_type(one, other), device="meta")

    torch._refs = sys.modules[REFERENCES]
    torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)
    _own.append(torch.library.Library("aten", "IMPL", "Meta"))
    _own[0].impl("where.self", where)  # Of the rotary angles of Llama 3.


def with_meta_kernels(make: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `make`, and if it fails, again with the deferred kernels."""
    try:
        return make(*arguments)
    except RuntimeError:
        if not _own:
            raise
        _own.clear()  # torch refuses another registration of an operation.
        sys.modules[META_KERNELS].activate_meta  # noqa: B018  # Which imports them.
        return make(*arguments)
