"""Tensors that a user's code declares: `{"name": ("FP32", [-1, 3])}`, where -1 is any size.

A third element has more of a tensor: `("FP32", [-1], {"optional": True})` is an input that may be left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.oip.model_description import TensorSpec
from headrace.oip.tensors import DATATYPES, RawTensor, Tensor
from headrace_protos import inference_pb2 as pb


def declared(mapping: Any) -> tuple[TensorSpec, ...]:
    """The tensors of a user's mapping; ValueError if it differs from the module's example."""
    try:
        tensors = tuple(_declared(name, *described) for name, described in mapping.items())
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not all(isinstance(tensor.name, str) and tensor.datatype in DATATYPES for tensor in tensors):
        raise ValueError("a name must be text, and a datatype one of the protocol's")
    return tensors


def _declared(name: Any, datatype: Any, shape: Any, more: Any = None) -> TensorSpec:
    attributes = dict(more or {})
    optional = attributes.pop("optional", False)
    if attributes or not isinstance(optional, bool):
        raise ValueError("the third element is no {'optional': True}")
    return TensorSpec(name, datatype, tuple(int(size) for size in shape), optional)


def check_requested_outputs(request: pb.ModelInferRequest) -> None:
    """Refuses outputs that are requested twice, or with Triton's classification extension."""
    names = set()
    for output in request.outputs:
        if output.name in names:
            raise InvalidRequestError(f"output {output.name!r} is given twice")
        names.add(output.name)
        if "classification" in output.parameters:
            raise InvalidRequestError(
                f"output {output.name!r}: the classification extension (class_count) is not supported"
            )


def check_inputs(tensors: Mapping[str, RawTensor | Tensor], specs: Sequence[TensorSpec]) -> None:
    """Refuses inputs that differ from the declared ones."""
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
    for name, spec in by_name.items():
        if name not in tensors and not spec.optional:
            raise InvalidRequestError(f"input {name!r} is missing")
