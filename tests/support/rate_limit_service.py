"""A rate limit service that speaks Envoy's protocol: fixed windows of a minute, by descriptor."""

import asyncio
import time
from collections import Counter
from typing import Any

import grpc

from headrace_protos.rate_limit_pb2 import RateLimitDescriptor, RateLimitRequest, RateLimitResponse, RateLimitUnit
from headrace_protos.rate_limit_pb2_grpc import RateLimitServiceServicer, add_RateLimitServiceServicer_to_server

_WINDOW_S = 60

Status = RateLimitResponse.DescriptorStatus


class RateLimitService(RateLimitServiceServicer):
    """Counts requests, and answers while `answers` is set; `requests` are the clients, in order."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.requests: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._began = time.monotonic()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> int:
        """Serves on loopback; returns the port."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_RateLimitServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def ShouldRateLimit(self, request: RateLimitRequest, context: Any) -> RateLimitResponse:  # noqa: N802
        assert request.domain == "headrace"
        await self.answers.wait()
        statuses = [self._status(each, request.hits_addend or 1) for each in request.descriptors]
        over = any(status.code == RateLimitResponse.OVER_LIMIT for status in statuses)
        return RateLimitResponse(
            overall_code=RateLimitResponse.OVER_LIMIT if over else RateLimitResponse.OK, statuses=statuses
        )

    def _status(self, descriptor: RateLimitDescriptor, hits: int) -> Status:
        ((key, client),) = [(entry.key, entry.value) for entry in descriptor.entries]
        assert (key, descriptor.limit.unit) == ("client", RateLimitUnit.MINUTE)
        self.requests.append(client)
        self.hits[client] += hits
        limit = descriptor.limit.requests_per_unit
        status = Status(
            code=RateLimitResponse.OK if self.hits[client] <= limit else RateLimitResponse.OVER_LIMIT,
            current_limit=RateLimitResponse.RateLimit(requests_per_unit=limit, unit=RateLimitUnit.MINUTE),
            limit_remaining=max(0, limit - self.hits[client]),
        )
        status.duration_until_reset.FromSeconds(_WINDOW_S - int(time.monotonic() - self._began) % _WINDOW_S)
        return status
