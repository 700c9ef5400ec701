"""Users that send tensors, made as the model's metadata describes its inputs.

`TensorUser` calls the predictor by gRPC, past the transformer: a generation model gets token ids there.
`TensorRestUser` calls by REST: a text model gets its prompt as a tensor.
"""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import numpy as np

from loadtest.gateway import GatewayError, Model, TensorDescription
from loadtest.users.base import GrpcUser, HttpUser
from loadtest.users.call import CallFailedError
from millrace.oip.parameters import set_parameters
from millrace_protos import inference_pb2, inference_pb2_grpc

_TOKEN_IDS = (3, 200)  # In every vocabulary, behind the special tokens of most.
_PROMPT_TENSOR = "text_input"
_IDS, _IDS_SO_FAR = "input_ids", "output_ids"
_METADATA_TIMEOUT_S = 5.0
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


class TensorUser(GrpcUser):
    """Sends `ModelInfer` to the predictor, bypassing the transformer."""

    row = "ModelInfer at the predictor"
    weight = 2
    text = False
    authority = "predictor"

    def find_model(self) -> Model:
        """With the inputs that the predictor describes."""
        name = self.session.model_for(text=False).name
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        try:
            answer = stub.ModelMetadata(
                inference_pb2.ModelMetadataRequest(name=name), timeout=_METADATA_TIMEOUT_S, metadata=self.metadata
            )
        except grpc.RpcError as error:
            raise GatewayError(f"metadata of {name}: {error.code().name}") from None
        return Model(
            name, tuple(TensorDescription(item.name, item.datatype, tuple(item.shape)) for item in answer.inputs)
        )

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        generation = any(tensor.name == _IDS_SO_FAR for tensor in self.model.inputs)
        request = inference_pb2.ModelInferRequest(model_name=self.model.name)
        for tensor in self.model.inputs:
            if generation and tensor.name != _IDS:
                continue  # Optional.
            shape = (self.options.tensor_shape[-1],) if generation else filled(tensor.shape, self.options.tensor_shape)
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            request.raw_input_contents.append(raw(values_of(tensor, shape)))
        if generation:
            set_parameters(request.parameters, {"max_tokens": max_tokens})
        with self.measured(arrival) as call:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)
            answer = stub.ModelInfer(request, timeout=self.options.deadline_s, metadata=self.metadata_of(call))
            call.size = answer.ByteSize()
            if not answer.outputs or not (any(answer.raw_output_contents) or answer.outputs[0].HasField("contents")):
                raise CallFailedError("the response has no tensors")


class TensorRestUser(HttpUser):
    """Posts to `/v2/models/{model}/infer`."""

    row = "v2 infer"
    text = False

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        body: dict[str, Any]
        if self.model.text:
            inputs = [{"name": _PROMPT_TENSOR, "datatype": "BYTES", "shape": [1], "data": [prompt]}]
            body = {"inputs": inputs, "parameters": {"max_tokens": max_tokens}}
        else:
            body = {"inputs": [json_tensor(tensor, self.options.tensor_shape) for tensor in self.model.inputs]}
        data = json.dumps(body).encode()
        path = f"/v2/models/{self.model.name}/infer"
        with self.measured(arrival) as call, self.posted(path, data, call) as answer:
            content = answer.read()
            call.size = len(content)
            if not json.loads(content).get("outputs"):
                raise CallFailedError("the response has no tensors")


def filled(shape: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with sizes of the given one, aligned at the end, for its open dimensions; 1 where that has none."""
    sizes = (1,) * max(0, len(shape) - len(given)) + given[max(0, len(given) - len(shape)) :]
    return tuple(given if size < 0 else size for size, given in zip(shape, sizes, strict=True))


def values_of(tensor: TensorDescription, shape: tuple[int, ...]) -> Any:
    """Random values; token ids where the type is one of integers, ones for a mask, zeros for token types."""
    if tensor.datatype == "BYTES":
        return np.array([b"word"] * int(np.prod(shape)), dtype=object).reshape(shape)
    if tensor.datatype not in _NUMPY:
        raise CallFailedError(f"input {tensor.name} is {tensor.datatype}, which this user cannot make")
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
