"""`headrace.v1.Development` at the transformer: kills the predictor that generates for a request.

For demonstrations, and only if the settings allow it. It asks the replicas in turn, each by its own address, and stops
at the first that has the request and so kills itself. Several replicas may have it (several choices, a hedged request);
the others continue.
"""

import time
from contextlib import suppress

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
        channels, ends_at = await self._replicas.channels(), time.monotonic() + _TIMEOUT_S
        for index, channel in enumerate(channels):
            # One that does not answer has none, and leaves time for those after it.
            timeout_s = (ends_at - time.monotonic()) / (len(channels) - index)
            predictor = headrace_pb2_grpc.PredictorDevelopmentStub(channel)
            with suppress(HeadraceError):
                await predictor.Kill(request, timeout=timeout_s, metadata=(DEVELOPMENT,))
                return pb.KillPredictorResponse()
        raise NotFoundError(f"no predictor generates for the request {request.request_id!r}")
