"""A service accepts a limited number of calls; one more is refused at once, unread, with a retry delay."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.limits.admission import Admission
from headrace.rpc.limits.byte_budget import RETRY_AFTER_MS
from headrace.rpc.server.server import Server
from headrace.settings import ServiceSettings

MAX_CALLS = 2


class Held(grpc.GenericRpcHandler):
    """`/test/held`, whose calls end when they are released; it counts the messages that it receives."""

    def __init__(self):
        self.release = asyncio.Event()
        self.messages = 0

    def service(self, details):
        async def held(request, context):
            self.messages += 1
            await self.release.wait()
            yield b"done"

        return grpc.unary_stream_rpc_method_handler(held) if details.method == "/test/held" else None


@pytest.fixture
async def served():
    settings = ServiceSettings.model_construct(drain_s=0.0)
    server, handler = (
        Server("test", settings, admission=Admission(MAX_CALLS)),
        Held(),
    )
    server.grpc.add_generic_rpc_handlers((handler,))
    port = server.grpc.add_insecure_port("127.0.0.1:0")
    await server.grpc.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, handler
    await server.grpc.stop(None)


def call(channel):
    return channel.unary_stream("/test/held")(b"message", timeout=30)


async def fill(channel, handler):
    calls = [asyncio.create_task(anext(aiter(call(channel)))) for _ in range(MAX_CALLS)]
    async with asyncio.timeout(30):
        while handler.messages < MAX_CALLS:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return calls


async def test_one_call_too_many_is_refused_at_once_and_unread(served):
    channel, handler = served
    calls = await fill(channel, handler)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(call(channel)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(refused.value.trailing_metadata())
    expected = {"x-http-status": "429", "x-failed-hop": "test", "retry-after-ms": str(RETRY_AFTER_MS)}
    assert expected.items() <= metadata.items()
    assert handler.messages == MAX_CALLS
    handler.release.set()
    assert await asyncio.gather(*calls) == [b"done"] * MAX_CALLS


async def test_a_full_service_is_healthy(served):
    channel, handler = served
    calls = await fill(channel, handler)
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=""), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    handler.release.set()
    await asyncio.gather(*calls)
