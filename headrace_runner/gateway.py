"""The gateway of a running stack, for gRPC calls, which have the caller's key."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from headrace.errors import StartupError
from headrace.rpc.client.caller_key import KEY, with_key
from headrace_protos import headrace_pb2_grpc, inference_pb2
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub

TIMEOUT_S = 10.0
_MAX_MESSAGE = 64 * 1024 * 1024


def open_channel(address: str, *options: tuple[str, Any], key: str = KEY) -> grpc.Channel:
    """A channel without a proxy, with further options; `key` is the environment variable of the calls' key."""
    own = (("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.enable_http_proxy", 0), *options)
    return with_key(grpc.insecure_channel(address, options=own), key)


class Gateway:
    """`key` is the environment variable of the calls' key. To be closed."""

    def __init__(self, address: str, key: str = KEY) -> None:
        self.address = address
        self.channel = open_channel(address, key=key)
        self.inference: Any = GRPCInferenceServiceStub(self.channel)
        self.text: Any = headrace_pb2_grpc.TextGenerationStub(self.channel)
        self.log: Any = headrace_pb2_grpc.PayloadLogStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def check(self) -> None:
        """Raises StartupError unless a stack answers."""
        with self.errors():
            self.inference.ServerLive(inference_pb2.ServerLiveRequest(), timeout=TIMEOUT_S)

    def ready_models(self) -> list[str]:
        with self.errors():
            index = self.inference.RepositoryIndex(inference_pb2.RepositoryIndexRequest(ready=True), timeout=TIMEOUT_S)
        return [model.name for model in index.models]

    def generates_text(self, model: str) -> bool:
        with self.errors():
            metadata = self.inference.ModelMetadata(inference_pb2.ModelMetadataRequest(name=model), timeout=TIMEOUT_S)
        return any(tensor.name == "text_input" for tensor in metadata.inputs)

    def has_chat_template(self, model: str) -> bool:
        with self.errors():
            answer = self.inference.ModelConfig(inference_pb2.ModelConfigRequest(name=model), timeout=TIMEOUT_S)
        return bool(answer.config.parameters["chat_template"].string_value == "true")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Converts gRPC's errors to StartupErrors with one line."""
        try:
            yield
        except grpc.RpcError as error:
            raise StartupError(self._line(error)) from None

    def _line(self, error: Any) -> str:
        # Errors from Envoy or a service name the failed hop.
        answered = {key for key, _ in error.trailing_metadata() or ()}
        if error.code() is grpc.StatusCode.UNAVAILABLE and "x-failed-hop" not in answered:
            return f"no stack answers at {self.address}; `headrace up` or `make up` starts one, --gateway names another"
        return f"{error.code().name}: {error.details()}"
