"""The processes of a stack that are not ready yet, from their health services and Envoy."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.server.server import READY
from headrace.telemetry.page import DIRECT
from headrace_runner.settings import LOOPBACK, StackSettings

_TIMEOUT_S = 1.0
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # Another stack of this process may have used the address.
    ("grpc.enable_http_proxy", 0),
)


class Readiness:
    """Checks each service, then Envoy's view of them, then the whole chain through the gateway."""

    def __init__(self, settings: StackSettings, services: dict[str, int]) -> None:
        """`services`: name → port of processes with a gRPC health service."""
        self._admin = f"http://{LOOPBACK}:{settings.gateway_admin_port}"
        self._channels = {name: _channel(f"{LOOPBACK}:{port}") for name, port in services.items()}
        self._gateway = _channel(settings.gateway)
        self._has_remote_predictors = bool(settings.predictor_endpoints)

    async def missing(self) -> tuple[str, ...]:
        """Names of what is not ready, processes most of all; empty once a generation through the gateway would work."""
        serving = await asyncio.gather(*(_serves(channel, "") for channel in self._channels.values()))
        if not all(serving):
            return tuple(name for name, serves in zip(self._channels, serving, strict=True) if not serves)
        if late := await asyncio.to_thread(self._late_by_envoy):
            return (late,)
        return () if await _serves(self._gateway, READY) else ("transformer",)

    async def close(self) -> None:
        for channel in (*self._channels.values(), self._gateway):
            await channel.close()

    def _late_by_envoy(self) -> str:
        """What does not pass Envoy's health checks: "" if every host of every cluster does.

        Of predictors of which some are elsewhere, one is enough.
        """
        try:
            with DIRECT.open(f"{self._admin}/clusters?format=json", timeout=_TIMEOUT_S) as answer:
                clusters: Iterable[dict[str, Any]] = json.load(answer)["cluster_statuses"]
        except (OSError, ValueError):
            return "envoy"
        healthy = {
            cluster["name"]: [
                host["health_status"] == {"eds_health_status": "HEALTHY"} for host in cluster.get("host_statuses", ())
            ]
            for cluster in clusters
        }
        if self._has_remote_predictors and not any(healthy.pop("predictor", ())):
            return "a predictor of PREDICTOR_ENDPOINTS"
        return "" if any(healthy.values()) and all(map(all, healthy.values())) else "envoy"


def _channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
