"""Users that send tensors, made as the model's metadata describes its inputs.

`TensorUser` calls the predictor by gRPC, past the transformer: a generation model gets token ids there.
`TensorRestUser` calls by REST: a text model gets its prompt as a tensor.
"""

import json
from typing import Any

import grpc

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import add_input
from headrace_protos import inference_pb2, inference_pb2_grpc
from loadtest.gateway import GatewayError
from loadtest.prompts import filled, filled_tensor, json_tensor, with_inputs
from loadtest.users.base import GrpcUser, HttpUser
from loadtest.users.call import CallFailedError

_PROMPT_TENSOR = "text_input"
_IDS, _IDS_SO_FAR = "input_ids", "output_ids"
_METADATA_TIMEOUT_S = 5.0


class TensorUser(GrpcUser):
    """Sends `ModelInfer` to the predictor, bypassing the transformer."""

    row = "ModelInfer at the predictor"
    weight = 2
    text = False
    authority = "predictor"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def find_model(self) -> inference_pb2.ModelMetadataResponse:
        """With the inputs that the predictor describes."""
        name = self.session.model_name(text=False)
        try:
            answer = self._stub.ModelMetadata(
                inference_pb2.ModelMetadataRequest(name=name), timeout=_METADATA_TIMEOUT_S, metadata=self.metadata
            )
        except grpc.RpcError as error:
            raise GatewayError(f"metadata of {name}: {error.code().name}") from None
        return with_inputs(answer, self.options.tensor_shape)

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        generation = any(tensor.name == _IDS_SO_FAR for tensor in self.model.inputs)
        request = inference_pb2.ModelInferRequest(model_name=self.model.name)
        for tensor in self.model.inputs:
            if generation and tensor.name != _IDS:
                continue  # Optional.
            shape = (self.options.tensor_shape[-1],) if generation else filled(tensor.shape, self.options.tensor_shape)
            add_input(request, filled_tensor(tensor, shape))
        if generation:
            set_parameters(request.parameters, {"max_tokens": max_tokens})
        with self.measured(arrival) as call:
            answer = self._stub.ModelInfer(request, timeout=self.options.deadline, metadata=self.metadata_of(call))
            call.size = answer.ByteSize()
            if not answer.outputs or not (any(answer.raw_output_contents) or answer.outputs[0].HasField("contents")):
                raise CallFailedError("the response has no tensors")


class TensorRestUser(HttpUser):
    """Posts to `/v2/models/{model}/infer`."""

    row = "v2 infer"
    text = False

    def find_model(self) -> inference_pb2.ModelMetadataResponse:
        """With the inputs that the transformer describes."""
        model = self.session.gateway.model(self.session.model_name(text=False))
        return with_inputs(model, self.options.tensor_shape)

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        body: dict[str, Any]
        if any(tensor.name == _PROMPT_TENSOR for tensor in self.model.inputs):
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
