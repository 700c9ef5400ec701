"""gRPC and HTTP/2: servers, what bounds their calls, clients. Here the types of gRPC that handlers see."""

from typing import Any, TypeAlias

import grpc

# Text, because grpc's classes are generic to the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
