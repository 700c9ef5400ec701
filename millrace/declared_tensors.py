"""Tensors that a user's code declares: `{"name": ("FP32", [-1, 3])}`, where -1 is any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.errors import InvalidRequestError
from millrace.tensors import DATATYPES, RawTensor


class Spec(Protocol):
    """What is declared of one tensor."""

    @property
    def name(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class DeclaredTensor:
    """A Spec."""

    name: str
    datatype: str
    shape: Sequence[int]


def declared(mapping: Any) -> tuple[DeclaredTensor, ...]:
    """What a user's mapping declares; ValueError where it does not look like the module's example."""
    try:
        tensors = tuple(
            DeclaredTensor(name, datatype, tuple(int(size) for size in shape))
            for name, (datatype, shape) in mapping.items()
        )
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not all(isinstance(tensor.name, str) and tensor.datatype in DATATYPES for tensor in tensors):
        raise ValueError("a name is no text, or a datatype is not the protocol's")
    return tensors


def check_inputs(tensors: Mapping[str, RawTensor], specs: Sequence[Spec]) -> None:
    """Refuses inputs that are not those declared."""
    by_name = {spec.name: spec for spec in specs}
    for name, tensor in tensors.items():
        spec = by_name.get(name)
        if spec is None:
            raise InvalidRequestError(f"unknown input {name!r}; the model takes {', '.join(by_name)}")
        if tensor.datatype != spec.datatype:
            raise InvalidRequestError(f"input {name!r} must be {spec.datatype}, not {tensor.datatype}")
        fits = all(size in (-1, given) for size, given in zip(spec.shape, tensor.shape, strict=False))
        if len(spec.shape) != len(tensor.shape) or not fits:
            raise InvalidRequestError(
                f"input {name!r} must have shape {list(spec.shape)}, not {list(tensor.shape)}; -1 is any size"
            )
    for name in by_name:
        if name not in tensors:
            raise InvalidRequestError(f"input {name!r} is missing")
