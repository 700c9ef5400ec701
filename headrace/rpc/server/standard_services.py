"""What every server has beside its own services: health by grpc.health.v1, and reflection v1alpha and v1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection as reflection_v1alpha
from grpc_reflection.v1alpha import reflection_pb2 as reflection_v1alpha_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc as reflection_v1alpha_grpc

from headrace.rpc.server.listeners import Listeners
from headrace_protos import reflection_v1_pb2


class HealthServicer(health.aio.HealthServicer):
    """grpcio-health-checking's, with the method that it lacks."""

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802  # The method's name.
        """Every name that Check knows, with its status."""
        answer = health_pb2.HealthCheckResponse
        statuses = {name: answer(status=status) for name, status in self._server_status.items()}  # type: ignore[attr-defined]
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]


class _SymbolPool:
    """The default pool of descriptors, which also finds the files of methods: clients look these up by name."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def add_reflection(server: Listeners, public_services: Iterable[str]) -> None:
    """Serves reflection v1alpha and v1, whose messages are the same under two package names."""
    v1 = reflection_v1_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    names = (*public_services, health.SERVICE_NAME, reflection_v1alpha.SERVICE_NAME, v1)
    servicer = reflection_v1alpha.aio.ReflectionServicer(names, _SymbolPool())
    reflection_v1alpha_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_v1alpha_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_v1alpha_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(v1, {"ServerReflectionInfo": method}),))
