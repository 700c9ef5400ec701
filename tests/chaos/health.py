"""The health of a service, or, at the gateway, of the services behind it."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.calls import channel

_TIMEOUT_S = 1.0


async def serves(address: str, name: str = "") -> bool:
    """Whether the service at `address` (host:port) answers SERVING."""
    async with channel(address) as open_channel:
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
