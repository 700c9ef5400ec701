"""`big_tensors`: no 502 between transformer and predictor, however large the tensors and however many at once.

64 callers, by gRPC and by V2 REST as JSON, for some seconds, with FULL=1 for 60: every answer equals its request, and
no process grows. One request a second with idle gaps is in test_idle_gaps.py, deadlines are in
tests/system/test_error_table.py.
"""

import asyncio
import time

import grpc
import httpx2
import numpy as np
import orjson
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.memory import peaks
from tests.support.full import FULL

SECONDS = 60 if FULL else 2
WARM_UP_S = max(1.5, SECONDS / 3)
AT_ONCE = 64
LEAST_TURNS = 2
CONNECTIONS = 8
# Token ids of 64 prompts of 2,048 tokens: 1 MiB in binary; a quarter of them is some 400 kB of JSON.
IDS = np.arange(64 * 2048, dtype=np.int64).reshape(64, 2048) % 50_000
NO_LIMIT = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
# Twice the size of all requests in flight; hundreds of times that passes through.
MOST_GROWTH = 2 * AT_ONCE * IDS.nbytes


@pytest_asyncio.fixture(scope="module")
async def stack(stacks):
    async with stacks.use(models="identity=models/identity") as started:
        yield started


def turns(end):
    """A caller's requests until `end`, and several even on a busy machine."""
    turn = 0
    while turn < LEAST_TURNS or time.monotonic() < end:
        yield turn
        turn += 1


async def by_grpc(stack, end):
    """The number of answers until `end`."""
    channels = [grpc.aio.insecure_channel(stack.gateway, options=NO_LIMIT) for _ in range(CONNECTIONS)]
    request, answers = pb.ModelInferRequest(model_name="identity"), 0
    add_input(request, Tensor("input_ids", "INT64", IDS))

    async def caller(number):
        nonlocal answers
        stub = GRPCInferenceServiceStub(channels[number % CONNECTIONS])
        for _ in turns(end):
            response = await stub.ModelInfer(request)
            assert list(response.raw_output_contents) == list(request.raw_input_contents)
            answers += 1

    try:
        await asyncio.gather(*(caller(number) for number in range(AT_ONCE)))
    finally:
        for channel in channels:
            await channel.close()
    return answers


async def by_rest(stack, end):
    """The same over REST with JSON."""
    ids = IDS[:16]
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": ids.shape, "data": ids.ravel().tolist()}
    body, answers = orjson.dumps({"inputs": [tensor]}), 0
    expected = None
    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=60) as client:

        async def caller():
            nonlocal answers, expected
            for _ in turns(end):
                response = await client.post("/v2/models/identity/infer", content=body)
                assert response.status_code == 200, response.text[:300]
                if expected is None:
                    assert orjson.loads(response.content)["outputs"][0]["data"] == tensor["data"]
                    expected = response.content
                assert response.content == expected
                answers += 1

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return answers


@pytest.mark.timeout(300 + 4 * SECONDS)
@pytest.mark.parametrize("protocol", [by_grpc, by_rest])
async def test_every_big_tensor_of_64_callers_is_answered_without_growth_of_memory(stack, protocol):
    processes = {name: stack.pid(name) for name in stack.names}
    async with peaks(stack) as before:
        await protocol(stack, time.monotonic() + WARM_UP_S)
    async with peaks(stack) as after:
        answers = await protocol(stack, time.monotonic() + SECONDS)
    growth = {name: size - before[name] for name, size in after.items()}
    in_mb = {name: f"{size / 1e6:.1f} of {before[name] / 1e6:.0f} MB" for name, size in growth.items()}
    print(f"{protocol.__name__}: {answers / SECONDS:.0f} answers a second, growth {in_mb}")
    assert answers >= LEAST_TURNS * AT_ONCE
    assert {name: stack.pid(name) for name in stack.names} == processes
    assert max(growth.values()) <= MOST_GROWTH, growth
