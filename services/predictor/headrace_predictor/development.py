"""`headrace.v1.PredictorDevelopment`: kills this predictor while it generates for a request.

For demonstrations; registered only if the settings allow it. The process ends as by SIGKILL: it drains nothing, hands
nothing back and closes nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal

import grpc

from headrace.errors import NotFoundError
from headrace.rpc import Context
from headrace.rpc.server.call_context import check_development
from headrace_predictor.repository.repository import ModelRepository
from headrace_protos import headrace_pb2 as pb
from headrace_protos import headrace_pb2_grpc

_ANSWER_S = 0.02  # Time for the response to leave.


def add_to_server(repository: ModelRepository, server: grpc.aio.Server) -> None:
    headrace_pb2_grpc.add_PredictorDevelopmentServicer_to_server(DevelopmentServicer(repository), server)


class DevelopmentServicer(headrace_pb2_grpc.PredictorDevelopmentServicer):
    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def Kill(  # noqa: N802
        self, request: pb.KillPredictorRequest, context: Context
    ) -> pb.KillPredictorResponse:
        check_development(context)
        if not request.request_id or not any(
            request.request_id in serving.request_ids for serving in self._repository.served
        ):
            raise NotFoundError(f"no request {request.request_id!r} is in flight here")
        asyncio.get_running_loop().call_later(_ANSWER_S, _die)
        return pb.KillPredictorResponse()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # The kernel ignores a signal that the first process of a container sends to itself.
    os._exit(128 + signal.SIGKILL)
