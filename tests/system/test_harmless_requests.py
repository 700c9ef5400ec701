"""Hostile requests through the real gateway: no process grows beyond its bounds, and other callers are served.

Each case runs beside a caller whose short calls must all be answered.
"""

import asyncio
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, text_request
from tests.waiting import until

MESSAGE_BYTES = 58_000_000
GROWTH = 300 * (1 << 20)
IDLE_CALLS = 2100
INFER, GENERATE = "/inference.GRPCInferenceService/ModelInfer", "/headrace.v1.TextGeneration/Generate"
STOP = bytes([headrace_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["stop"].number << 3 | 2, 0])


def texts():
    """14 million empty texts, with a matching shape."""
    request = pb.ModelInferRequest(model_name="normalizer", raw_input_contents=[bytes(MESSAGE_BYTES // 4 * 4)])
    request.inputs.add(name="text", datatype="BYTES", shape=[MESSAGE_BYTES // 4])
    return request.SerializeToString()


CASES = {
    "29 million empty tensors": (None, INFER, lambda: b"\x2a\0" * (MESSAGE_BYTES // 2)),
    "29 million empty tensors, to the predictor": ("predictor", INFER, lambda: b"\x2a\0" * (MESSAGE_BYTES // 2)),
    "29 million stop strings": (None, GENERATE, lambda: STOP * (MESSAGE_BYTES // 2)),
    "14 million texts": (None, INFER, texts),
    "14 million texts, to the predictor": ("predictor", INFER, texts),
}


@asynccontextmanager
async def another_caller(stack):
    """Short calls, one after the other, each of which must be answered."""
    answered = 0
    async with channel(stack.gateway) as own:
        stub = GRPCInferenceServiceStub(own)

        async def call():
            nonlocal answered
            while True:
                await stub.ModelInfer(text_request("storyteller", "Once", max_tokens=1), timeout=60)
                answered += 1

        calling = asyncio.create_task(call())
        await until(lambda: answered or calling.done())
        before = answered
        yield
        await until(lambda: answered > before or calling.done())
        assert not calling.done(), calling.exception()
        calling.cancel()


def resident(stack):
    return {name: psutil.Process(stack.pid(name)).memory_info().rss for name in stack.names}


@pytest.mark.parametrize(("authority", "method", "message"), CASES.values(), ids=CASES)
async def test_a_memory_bomb_is_refused(stack, authority, method, message):
    before, pids = resident(stack), {name: stack.pid(name) for name in stack.names}
    most = dict(before)
    data = message()
    async with another_caller(stack), channel(stack.gateway, authority) as attacker:
        call = attacker.unary_stream(method)(data, timeout=60)
        ended = asyncio.ensure_future(call.code())
        while not ended.done():
            most = {name: max(most[name], size) for name, size in resident(stack).items()}
            await asyncio.wait((ended,), timeout=0.05)
        assert ended.result() is grpc.StatusCode.INVALID_ARGUMENT, await call.details()
    growth = {name: (size - before[name]) >> 20 for name, size in most.items()}
    print(growth)
    assert max(growth.values()) << 20 <= GROWTH, growth
    assert {name: stack.pid(name) for name in stack.names} == pids


async def test_idle_calls_block_no_other_caller(stack):
    before = resident(stack)
    async with (
        channel(stack.gateway) as first,
        channel(stack.gateway) as second,
        channel(stack.gateway) as third,
    ):
        idle = []
        for number in range(IDLE_CALLS):
            stub = GRPCInferenceServiceStub((first, second, third)[number % 3])
            idle.append(stub.ModelStreamInfer())
            if number % 100 == 99:  # They are sent as fast as they are accepted.
                await stub.ServerLive(pb.ServerLiveRequest(), timeout=60)
        async with another_caller(stack):
            # One of them sends its request late, behind all the others.
            await idle[-1].write(text_request("storyteller", "Once", max_tokens=1))
            answer = await asyncio.wait_for(idle[-1].read(), 60)
            assert not answer.error_message
        growth = {name: (size - before[name]) >> 20 for name, size in resident(stack).items()}
        print(growth)
        assert not any(call.done() for call in idle)
        for call in idle:
            call.cancel()
    assert max(growth.values()) << 20 <= GROWTH, growth
