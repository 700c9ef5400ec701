"""`millrace.v1.Development` at the transformer: kills the predictor that generates for a request.

For demonstrations, and only if the settings allow it. It calls every replica by its own address, because only Envoy
knows which one has the request; that one kills itself.
"""

from __future__ import annotations

import asyncio

import grpc

from millrace.errors import MillraceError, NotFoundError
from millrace.rpc.development import REQUESTED, SERVICE, check_requested
from millrace.rpc.handlers import Context
from millrace_protos import millrace_pb2 as pb
from millrace_protos import millrace_pb2_grpc
from services.transformer.predictors.replicas import Replicas

_TIMEOUT_S = 2.0


def services(development: bool) -> tuple[str, ...]:
    return (SERVICE,) if development else ()


def add_to_server(replicas: Replicas, server: grpc.aio.Server) -> None:
    millrace_pb2_grpc.add_DevelopmentServicer_to_server(DevelopmentServicer(replicas), server)


class DevelopmentServicer(millrace_pb2_grpc.DevelopmentServicer):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def KillPredictor(  # noqa: N802
        self, request: pb.KillPredictorRequest, context: Context
    ) -> pb.KillPredictorResponse:
        check_requested(context)
        channels = await self._replicas.channels()
        killed = await asyncio.gather(*(_kill(channel, request) for channel in channels))
        if not any(killed):
            raise NotFoundError(f"no predictor generates for the request {request.request_id!r}")
        return pb.KillPredictorResponse()


async def _kill(channel: grpc.aio.Channel, request: pb.KillPredictorRequest) -> bool:
    """Whether the predictor behind a channel had the request, and so kills itself; an unreachable one has none."""
    try:
        await millrace_pb2_grpc.PredictorDevelopmentStub(channel).Kill(
            request, timeout=_TIMEOUT_S, metadata=(REQUESTED,)
        )
    except MillraceError:
        return False
    return True
