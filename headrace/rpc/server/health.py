"""Health by grpc.health.v1: a service's own, and that of another process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.errors import HeadraceError

_TIMEOUT_S = 2.0
_INTERVAL_S = 1.0


class HealthServicer(health.aio.HealthServicer):
    """grpcio-health-checking's, with the method that it lacks."""

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802  # The method's name.
        """Every name that Check knows, with its status."""
        answer = health_pb2.HealthCheckResponse
        statuses = {name: answer(status=status) for name, status in self._server_status.items()}  # type: ignore[attr-defined]
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]


async def is_serving(channel: grpc.aio.Channel, name: str) -> bool:
    """Whether the server behind a channel of `open_channel` reports SERVING for `name`; False if it does not answer."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    except HeadraceError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def watch_serving(channel: grpc.aio.Channel, name: str, report: Callable[[bool], Awaitable[None]]) -> None:
    """Reports every second whether `name` is served, until cancelled."""
    while True:
        await report(await is_serving(channel, name))
        await asyncio.sleep(_INTERVAL_S)
