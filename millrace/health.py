"""Asks another process how it is, by grpc.health.v1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.errors import MillraceError

_TIMEOUT_S = 2.0
_INTERVAL_S = 1.0


async def is_serving(channel: grpc.aio.Channel, name: str) -> bool:
    """Whether the server behind a channel of `open_channel` says SERVING for `name`; False where it says nothing."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    except MillraceError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def watch_serving(channel: grpc.aio.Channel, name: str, tell: Callable[[bool], Awaitable[None]]) -> None:
    """Tells every second whether `name` is served, for ever."""
    while True:
        await tell(await is_serving(channel, name))
        await asyncio.sleep(_INTERVAL_S)
