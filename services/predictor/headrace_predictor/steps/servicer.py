"""`headrace.v1.PredictorSteps`, for transformers only: neither routed by the gateway nor listed by reflection.

It is served by MessageServer at a port of its own. A call at the port of gRPC is told that port, and served too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.rpc import Context
from headrace.rpc.http2.server import MessageServer
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.steps.call import StepsCall
from headrace_protos import steps_pb2

SERVICE = "headrace.v1.PredictorSteps"


class StepsServicer:
    """Opens one StepsCall for each call. `stopping` is set when the process accepts no new calls.

    `own_port` is to be started with the server of gRPC; it shares its port if that is given, and `shares_port`.
    """

    def __init__(self, repository: ModelRepository, stopping: asyncio.Event, shares_port: bool = False) -> None:
        self._repository = repository
        self._stopping = stopping
        self.own_port = MessageServer("predictor", {f"/{SERVICE}/Run": self._serve}, shares_port)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service; its responses are bytes already."""
        method: Any = grpc.stream_stream_rpc_method_handler(
            self.Run, request_deserializer=steps_pb2.StepsRequest.FromString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Run": method}),))

    async def Run(self, request_iterator: AsyncIterator[steps_pb2.StepsRequest], context: Context) -> None:
        call = StepsCall(self._repository, self._stopping, self.own_port.port)
        await call.run(request_iterator, context.write)

    async def _serve(self, messages: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> None:
        await StepsCall(self._repository, self._stopping).run(_requests(messages), write)


async def _requests(messages: AsyncIterator[bytes]) -> AsyncIterator[steps_pb2.StepsRequest]:
    async for message in messages:
        try:
            request = steps_pb2.StepsRequest.FromString(message)
        except DecodeError:
            raise InvalidRequestError("the message cannot be parsed") from None
        yield request
