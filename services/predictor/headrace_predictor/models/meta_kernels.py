"""torch's kernels in Python for tensors without data ("meta"), which are a third of its import and import SymPy.

Nearly all models are made with the kernels in C++, and one here. An engine host defers torch's others (host.py's
`light_imports`); a model that needs them imports them.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

META_KERNELS = "torch._meta_registrations"
REFERENCES = "torch._refs"  # They import it; `torch.broadcast_shapes` uses it.
_own: list[Any] = []  # The registrations of kernels here.


def do_without() -> None:
    """Does once what torch does beside, while it imports the kernels that have been deferred."""
    import torch

    def where(condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        shape = (condition * one * other).shape
        return torch.empty(shape, dtype=torch.result_type(one, other), device="meta")

    if not _are_there():
        torch._refs = sys.modules[REFERENCES]
        torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)
        _own.append(torch.library.Library("aten", "IMPL", "Meta"))  # type: ignore[no-untyped-call]
        _own[0].impl("where.self", where)  # Of the rotary angles of Llama 3.


def with_meta_kernels(make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls `make`, again with the deferred kernels if it fails without."""
    try:
        return make(*arguments, **named)
    except RuntimeError:
        if _are_there():
            raise
        _own.clear()  # torch refuses another registration of an operation.
        sys.modules[META_KERNELS].activate_meta  # noqa: B018  # Which imports them.
        return make(*arguments, **named)


def _are_there() -> bool:
    return "activate_meta" in vars(sys.modules[META_KERNELS])
