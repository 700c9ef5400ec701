"""Weights of a model that stay in their file until a runner needs them, each a matrix of grouped numbers.

A module without its weight refuses to compute, so that no answer comes from weights that are not there.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace_predictor.engine.cpu.grouped import GroupedMatrix, quantised

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class StoredMatrix(Protocol):
    """A matrix in a file."""

    @property
    def kind(self) -> str:
        """The name of its format."""

    @property
    def grouped(self) -> GroupedMatrix:
        """As it is."""

    def values(self, dtype: torch.dtype) -> Tensor:
        """All of it, as numbers."""


def leave_unread(module: Any, matrix: StoredMatrix) -> None:
    """Leaves the weight of a module in its file, so far."""
    module.stored, module.is_unread = matrix, True
    module.register_forward_pre_hook(_refuse)


def _refuse(module: Any, _: Any) -> None:
    if module.is_unread:
        raise RuntimeError(f"the weights of {list(module.weight.shape)} have not been read")


@contextmanager
def as_zeros(model: Any) -> Iterator[None]:
    """Lets a model compute with zeros for what has not been read: for runs whose numbers do not count."""
    unread = [module for module in model.modules() if getattr(module, "is_unread", False)]
    for module in unread:
        module.is_unread = False
    try:
        yield
    finally:
        for module in unread:
            module.is_unread = True


def read_weights(model: Any, layers: int | None = None) -> None:
    """Reads what has not been read: of the first `layers`, by default of all, and outside of the layers."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        layer = _LAYER.search(f".{name}.")
        if getattr(module, "is_unread", False) and (layers is None or layer is None or int(layer[1]) < layers):
            module.is_unread = False
            if not (tied and module is head):
                read = module.stored.values(module.weight.dtype).to(module.weight.device)
                module.weight = nn.Parameter(read, requires_grad=False)
    if tied:
        head.weight = embedding.weight


def stored_formats(model: Any) -> list[str]:
    """The formats of the matrices that are in a file; empty for any other model."""
    return sorted({module.stored.kind for module in model.modules() if hasattr(module, "stored")})


def grouped_matrix(module: Any) -> GroupedMatrix:
    """A module's weight as grouped numbers: of its file, or quantised."""
    stored: StoredMatrix | None = getattr(module, "stored", None)
    return quantised(module.weight.detach()) if stored is None else stored.grouped
