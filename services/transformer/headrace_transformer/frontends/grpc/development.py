"""`headrace.v1.Development` at the transformer: kills the predictor that generates for a request.

For demonstrations, and only if the settings allow it. It asks the replicas in turn, each by its own address, and stops
at the first that has the request and so kills itself. Several replicas may have it (several choices, a hedged request);
the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc

from headrace.errors import HeadraceError, NotFoundError
from headrace.rpc import Context
from headrace.rpc.server.call_context import DEVELOPMENT, check_development
from headrace_protos import headrace_pb2 as pb
from headrace_protos import headrace_pb2_grpc
from headrace_transformer.predictors.discovery.replicas import Replicas

_TIMEOUT_S = 2.0  # Of all replicas together.


class DevelopmentServicer(headrace_pb2_grpc.DevelopmentServicer):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def KillPredictor(  # noqa: N802
        self, request: pb.KillPredictorRequest, context: Context
    ) -> pb.KillPredictorResponse:
        check_development(context)
        channels = await self._replicas.channels()
        if not await _kill_first(channels, request):
            raise NotFoundError(f"no predictor generates for the request {request.request_id!r}")
        return pb.KillPredictorResponse()


async def _kill_first(channels: Sequence[grpc.aio.Channel], request: pb.KillPredictorRequest) -> bool:
    """Whether a predictor had the request; one that does not answer leaves time for those after it."""
    ends_at = time.monotonic() + _TIMEOUT_S
    for index, channel in enumerate(channels):
        timeout_s = (ends_at - time.monotonic()) / (len(channels) - index)
        if await _kill(channel, request, timeout_s):
            return True
    return False


async def _kill(channel: grpc.aio.Channel, request: pb.KillPredictorRequest, timeout_s: float) -> bool:
    """Whether the predictor behind a channel had the request, and so kills itself; an unreachable one has none."""
    try:
        await headrace_pb2_grpc.PredictorDevelopmentStub(channel).Kill(
            request, timeout=timeout_s, metadata=(DEVELOPMENT,)
        )
    except HeadraceError:
        return False
    return True
