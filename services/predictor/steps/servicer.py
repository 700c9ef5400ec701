"""`millrace.v1.PredictorSteps`, for transformers only: neither routed by the gateway nor listed by reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from millrace.rpc.handlers import Context
from millrace_protos import steps_pb2
from services.predictor.repository.repository import ModelRepository
from services.predictor.steps.call import StepsCall

SERVICE = "millrace.v1.PredictorSteps"


class StepsServicer:
    """Opens one StepsCall for each call. `stopping` is set when the process accepts no new calls."""

    def __init__(self, repository: ModelRepository, stopping: asyncio.Event) -> None:
        self._repository = repository
        self._stopping = stopping

    async def Run(self, request_iterator: AsyncIterator[steps_pb2.StepsRequest], context: Context) -> None:
        await StepsCall(self._repository, self._stopping).run(request_iterator, context.write)


def add_to_server(repository: ModelRepository, stopping: asyncio.Event, server: grpc.aio.Server) -> None:
    """Registers the service; its responses are bytes already."""
    method: Any = grpc.stream_stream_rpc_method_handler(
        StepsServicer(repository, stopping).Run, request_deserializer=steps_pb2.StepsRequest.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Run": method}),))
