"""Tensors of random values, as a model's metadata describes its inputs."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.oip.tensors import BF16, BYTES, DATATYPES, Tensor, dtype_of
from headrace_protos.inference_pb2 import ModelMetadataResponse
from loadtest.gateway import GatewayError

_TOKEN_IDS = (3, 200)  # In every vocabulary, behind the special tokens of most.


def with_inputs(model: ModelMetadataResponse, given: tuple[int, ...]) -> ModelMetadataResponse:
    """The model; one that takes any inputs gets one of INT64 and the given shape.

    Raises GatewayError for a model with an input of whose type there are no values here.
    """
    if not model.inputs:
        model.inputs.add(name="input", datatype="INT64", shape=given)
    for tensor in model.inputs:
        if tensor.datatype not in DATATYPES - {BF16}:
            raise GatewayError(
                f"input {tensor.name} of {model.name} is {tensor.datatype}: there are no random values of it"
            )
    return model


def filled(shape: Sequence[int], given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with sizes of the given one, aligned at the end, for its open dimensions; 1 where that has none."""
    sizes = (1,) * max(0, len(shape) - len(given)) + given[max(0, len(given) - len(shape)) :]
    return tuple(own if own >= 0 else size for own, size in zip(shape, sizes, strict=True))


def filled_tensor(tensor: ModelMetadataResponse.TensorMetadata, shape: tuple[int, ...]) -> Tensor:
    """Random values; token ids where the type is one of integers, ones for a mask, zeros for token types."""
    return Tensor(tensor.name, tensor.datatype, _values(tensor, shape))


def _values(tensor: ModelMetadataResponse.TensorMetadata, shape: tuple[int, ...]) -> Any:
    dtype = dtype_of(tensor.name, tensor.datatype)
    if tensor.datatype == BYTES:
        return np.full(shape, b"word", dtype)
    if "mask" in tensor.name:
        return np.ones(shape, dtype)
    if "token_type" in tensor.name:
        return np.zeros(shape, dtype)
    random_values = np.random.default_rng(random.getrandbits(64))
    if tensor.datatype.startswith("FP"):
        return random_values.random(shape).astype(dtype)
    if tensor.datatype == "BOOL":
        return random_values.random(shape) < 0.5
    least, end = (3, 100) if tensor.datatype.endswith("INT8") else _TOKEN_IDS
    return random_values.integers(least, end, shape).astype(dtype)


def json_tensor(tensor: ModelMetadataResponse.TensorMetadata, given: tuple[int, ...]) -> dict[str, Any]:
    """A tensor of V2 REST."""
    shape = filled(tensor.shape, given)
    values = _values(tensor, shape)
    data = [item.decode() for item in values.flat] if values.dtype == object else values.reshape(-1).tolist()
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(shape), "data": data}
