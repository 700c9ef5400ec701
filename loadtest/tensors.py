"""Tensors of random values, as a model's metadata describes its inputs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from loadtest.gateway import GatewayError, Model, TensorDescription

_TOKEN_IDS = (3, 200)  # In every vocabulary, behind the special tokens of most.
_TEXT = "BYTES"
_NUMPY = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def with_inputs(model: Model, given: tuple[int, ...]) -> Model:
    """The model; one that takes any inputs gets one of INT64 and the given shape.

    Raises GatewayError for a model with an input of whose type there are no values here.
    """
    if not model.inputs:
        return Model(model.name, (TensorDescription("input", "INT64", given),))
    for tensor in model.inputs:
        if tensor.datatype != _TEXT and tensor.datatype not in _NUMPY:
            raise GatewayError(
                f"input {tensor.name} of {model.name} is {tensor.datatype}: there are no random values of it"
            )
    return model


def filled(shape: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with sizes of the given one, aligned at the end, for its open dimensions; 1 where that has none."""
    sizes = (1,) * max(0, len(shape) - len(given)) + given[max(0, len(given) - len(shape)) :]
    return tuple(given if size < 0 else size for size, given in zip(shape, sizes, strict=True))


def values_of(tensor: TensorDescription, shape: tuple[int, ...]) -> Any:
    """Random values; token ids where the type is one of integers, ones for a mask, zeros for token types."""
    if tensor.datatype == _TEXT:
        return np.array([b"word"] * int(np.prod(shape)), dtype=object).reshape(shape)
    if "mask" in tensor.name:
        return np.ones(shape, _NUMPY[tensor.datatype])
    if "token_type" in tensor.name:
        return np.zeros(shape, _NUMPY[tensor.datatype])
    random_values = np.random.default_rng(random.getrandbits(64))
    if tensor.datatype.startswith("FP"):
        return random_values.random(shape).astype(_NUMPY[tensor.datatype])
    if tensor.datatype == "BOOL":
        return random_values.random(shape) < 0.5
    least, end = (3, 100) if tensor.datatype.endswith("INT8") else _TOKEN_IDS
    return random_values.integers(least, end, shape).astype(_NUMPY[tensor.datatype])


def raw(values: Any) -> bytes:
    """In the binary form of the Open Inference Protocol."""
    if values.dtype == object:
        return b"".join(len(item).to_bytes(4, "little") + item for item in values.flat)
    contents: bytes = values.tobytes()
    return contents


def json_tensor(tensor: TensorDescription, given: tuple[int, ...]) -> dict[str, Any]:
    """A tensor of V2 REST."""
    shape = filled(tensor.shape, given)
    values = values_of(tensor, shape)
    data = [item.decode() for item in values.flat] if values.dtype == object else values.reshape(-1).tolist()
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(shape), "data": data}
