"""Exactly one of the predictors of a request, which several choices or hedging have, is killed."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import grpc

from headrace.errors import NotFoundError
from headrace.rpc.server.call_context import DEVELOPMENT
from headrace.rpc.server.handlers import Interceptor
from headrace_protos import headrace_pb2 as pb
from headrace_protos import headrace_pb2_grpc
from headrace_transformer.frontends.grpc import text_generation_servicer
from headrace_transformer.predictors.discovery.replicas import Replicas
from headrace_transformer.predictors.oip.client import PredictorClient
from tests.process.foreign_server import one_service

REQUEST = pb.KillPredictorRequest(request_id="mine")


class Victim(headrace_pb2_grpc.PredictorDevelopmentServicer):
    """A predictor that records its kill, with or without the request; if it `hangs`, it does not answer."""

    def __init__(self, has_request, hangs=False):
        self.has_request = has_request
        self.hangs = hangs
        self.deaths = 0

    async def Kill(self, request, context):  # noqa: N802
        if self.hangs:
            await asyncio.Event().wait()
        if not self.has_request:
            raise NotFoundError("no such request")
        self.deaths += 1
        return pb.KillPredictorResponse()


def served(add_to_server):
    """The address of a server with one service; an interceptor belongs to one server."""
    return one_service(add_to_server, (Interceptor("test"),))


@asynccontextmanager
async def stub_before(*victims):
    """A stub of `Development` before these predictors, which are called in this order."""
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(
                served(partial(headrace_pb2_grpc.add_PredictorDevelopmentServicer_to_server, victim))
            )
            for victim in victims
        ]
        client = PredictorClient("127.0.0.1:1")
        stack.push_async_callback(client.close)
        replicas = Replicas(addresses, client)
        stack.push_async_callback(replicas.close)
        address = await stack.enter_async_context(
            served(
                partial(
                    headrace_pb2_grpc.add_DevelopmentServicer_to_server,
                    text_generation_servicer.DevelopmentServicer(replicas),
                )
            )
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield headrace_pb2_grpc.DevelopmentStub(channel)


async def test_only_one_of_the_predictors_with_the_request_dies():
    victims = Victim(False), Victim(True), Victim(True)
    async with stub_before(*victims) as stub:
        await stub.KillPredictor(REQUEST, metadata=(DEVELOPMENT,))
    assert [victim.deaths for victim in victims] == [0, 1, 0]


async def test_a_predictor_that_does_not_answer_does_not_hide_the_next(monkeypatch):
    monkeypatch.setattr(text_generation_servicer, "_TIMEOUT_S", 1.0)
    victims = Victim(True, hangs=True), Victim(True)
    async with stub_before(*victims) as stub:
        await stub.KillPredictor(REQUEST, metadata=(DEVELOPMENT,))
    assert [victim.deaths for victim in victims] == [0, 1]
