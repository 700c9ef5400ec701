"""A service accepts a limited number of calls; idle ones take no place of active ones, and end after a long time, or if
there are too many."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.limits.admission import Admission
from headrace.rpc.limits.byte_budget import RETRY_AFTER_MS
from headrace.rpc.server.server import Server
from headrace.settings import ServiceSettings
from headrace_protos.inference_pb2 import ModelInferRequest
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub, add_GRPCInferenceServiceServicer_to_server
from tests.process.memory_service import Inference
from tests.support.listening import listening
from tests.support.status import code_of, refusal

MAX_CALLS, MAX_IDLE = 2, 8


class Served:
    def __init__(self, admission, servicer, channel):
        self.admission = admission
        self.servicer = servicer
        self.stub = GRPCInferenceServiceStub(channel)
        self.channel = channel

    async def until(self, idle=None, in_flight=None):
        while not (idle in (None, self.admission.idle) and in_flight in (None, self.admission.in_flight)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def open(self, metadata=()):
        """An idle stream, as most begin."""
        call = self.stub.ModelStreamInfer(metadata=metadata)
        return call, asyncio.ensure_future(call.read())

    async def opened(self, count):
        calls = []
        for number in range(count):
            calls.append(self.open())
            await self.until(idle=number + 1)
        return calls


@pytest.fixture
async def serve():
    async with AsyncExitStack() as running:

        async def start(**limits):
            admission = Admission(MAX_CALLS, max_idle=MAX_IDLE, **limits)
            settings = ServiceSettings.model_construct(drain_s=0.0)
            server, servicer = (Server("test", settings, admission=admission), Inference())
            add_GRPCInferenceServiceServicer_to_server(servicer, server.grpc)
            address = await running.enter_async_context(listening(server.grpc))
            channel = await running.enter_async_context(grpc.aio.insecure_channel(address))
            return Served(admission, servicer, channel)

        yield start


async def test_one_call_too_many_is_refused_at_once_and_unread_by_a_healthy_service(serve):
    served = await serve()
    calls = [served.stub.ModelInfer(ModelInferRequest(id="held")) for _ in range(MAX_CALLS)]
    await served.until(in_flight=MAX_CALLS)
    refused = await refusal(served.stub.ModelInfer(ModelInferRequest()))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    expected = {"x-http-status": "429", "x-failed-hop": "test", "retry-after-ms": str(RETRY_AFTER_MS)}
    assert expected.items() <= dict(refused.trailing_metadata()).items()
    health = health_pb2_grpc.HealthStub(served.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    served.servicer.go.set()
    assert [(await call).id for call in calls] == ["held"] * MAX_CALLS
    assert served.servicer.messages == MAX_CALLS


async def test_a_stream_counts_while_a_request_of_it_is_in_flight(serve):
    served = await serve()
    calls = await served.opened(MAX_CALLS + 1)
    for call, _ in calls[:MAX_CALLS]:
        for _ in range(3):
            await call.write(ModelInferRequest(id="held"))
    await served.until(idle=1, in_flight=MAX_CALLS)
    assert await code_of(served.stub.ModelInfer(ModelInferRequest())) is grpc.StatusCode.RESOURCE_EXHAUSTED
    # A refused request on a stream is refused alone, by its id: the stream stays open.
    call, read = calls[MAX_CALLS]
    await call.write(ModelInferRequest(id="too many"))
    answer = await read
    assert (answer.infer_response.id, "in flight" in answer.error_message) == ("too many", True)
    served.servicer.go.set()
    await served.until(idle=MAX_CALLS + 1, in_flight=0)
    await call.write(ModelInferRequest(id="later"))
    assert (await call.read()).infer_response.id == "later"


async def test_calls_without_a_message_and_watches_are_idle(serve):
    served = await serve()
    unsent = served.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
    unary = [unsent() for _ in range(2 * MAX_CALLS)]
    health = health_pb2_grpc.HealthStub(served.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    for watch in watches:
        await watch.read()
    await served.until(idle=2 * MAX_CALLS + 2, in_flight=0)
    served.servicer.go.set()
    await served.stub.ModelInfer(ModelInferRequest())
    more = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_IDLE)]
    for call in watches:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in more:
        assert (await watch.read()).status
    unary += [unsent() for _ in range(MAX_IDLE)]
    for call in unary[: 2 * MAX_CALLS]:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not any(call.done() for call in (*unary[2 * MAX_CALLS :], *more))
    assert served.admission.idle == 2 * MAX_IDLE


async def test_a_stream_that_is_idle_for_too_long_ends_and_one_that_waits_for_an_answer_does_not(serve):
    served = await serve(idle_timeout_s=1.0)
    call, _ = served.open()
    await call.write(ModelInferRequest(id="slow"))
    await served.until(in_flight=1)
    _, idle = served.open()
    assert await code_of(idle) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.admission.in_flight == 1
    served.servicer.go.set()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # Idle since its answer.


@pytest.mark.parametrize("key", ["x-headrace-client", "x-forwarded-for"])
async def test_a_caller_that_opens_too_many_streams_loses_its_own(serve, key):
    served = await serve(max_idle_of_one=MAX_IDLE // 2)
    patient, read = served.open(((key, "patient"),))
    await served.until(idle=1)
    greedy = []
    for number in range(3 * MAX_IDLE):
        greedy.append(served.open(((key, "greedy"),)))
        await served.until(idle=1 + min(number + 1, MAX_IDLE // 2))
    for call, _ in greedy[: -MAX_IDLE // 2]:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not any(call.done() for call, _ in greedy[-MAX_IDLE // 2 :])
    served.servicer.go.set()
    await patient.write(ModelInferRequest(id="still here"))
    assert (await read).infer_response.id == "still here"
