"""The processes of a stack that are not ready yet, from their health services and Envoy."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.rpc.server import READY
from runner.settings import LOOPBACK, StackSettings

_TIMEOUT_S = 1.0
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # Another stack of this process may have used the address.
)


class Readiness:
    """Checks each service, then Envoy's view of them, then the whole chain through the gateway."""

    def __init__(self, settings: StackSettings, services: dict[str, int]) -> None:
        """`services`: name → port of processes with a gRPC health service."""
        self._admin = f"http://{LOOPBACK}:{settings.gateway_admin_port}"
        self._channels = {name: _channel(f"{LOOPBACK}:{port}") for name, port in services.items()}
        self._gateway = _channel(settings.gateway)

    async def missing(self) -> tuple[str, ...]:
        """Names of processes that are not ready; empty once a generation through the gateway would work."""
        serving = await asyncio.gather(*(_serves(channel, "") for channel in self._channels.values()))
        if not all(serving):
            return tuple(name for name, serves in zip(self._channels, serving, strict=True) if not serves)
        if not await asyncio.to_thread(self._envoy_sees_all):
            return ("envoy",)
        return () if await _serves(self._gateway, READY) else ("transformer",)

    async def close(self) -> None:
        for channel in (*self._channels.values(), self._gateway):
            await channel.close()

    def _envoy_sees_all(self) -> bool:
        """Whether every host of every cluster passes Envoy's health checks."""
        try:
            with urllib.request.urlopen(f"{self._admin}/clusters?format=json", timeout=_TIMEOUT_S) as answer:  # noqa: S310
                clusters: Iterable[dict[str, Any]] = json.load(answer)["cluster_statuses"]
        except (OSError, ValueError):
            return False
        statuses = [host["health_status"] for cluster in clusters for host in cluster.get("host_statuses", ())]
        return bool(statuses) and all(status == {"eds_health_status": "HEALTHY"} for status in statuses)


def _channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
