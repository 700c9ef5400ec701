"""Replacing every service of a running stack: no request of any kind fails, and long streams go on."""

import asyncio
import sys

import grpc
import httpx2
import numpy as np
import pytest

from headrace.oip.tensors import Tensor
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.slow.kinds_of_requests import COMPLETIONS, LONG, STREAM, Reader
from tests.system.calls import channel, ids_request, infer

pytestmark = pytest.mark.timeout(480)

# Paced, a long stream takes ten seconds; a successor takes a few to load.
PACE = {"PACE_MS": "12"}
ASKED = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0, **LONG}
REQUESTS = {
    "text": (COMPLETIONS, {**ASKED, "max_tokens": 2}),
    "events": (COMPLETIONS, {**ASKED, "max_tokens": 8, **STREAM}),
    "Generate": ("", {**ASKED, "max_tokens": 2}),
    "a long stream": ("", {**ASKED, "max_tokens": 650}),
}


async def test_a_roll_under_load_fails_no_call_and_applies_the_present_settings(new_stack):
    stack = await new_stack(
        predictors=2,  # They are replaced one by one.
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
        environment={"predictor": PACE},
    )
    before = {name: stack.pid(name) for name in stack.names}
    tensors = ids_request("storyteller", Tensor("input_ids", "INT64", np.array([5, 6, 7])), max_tokens=2)
    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=None) as http:

        async def answer(kind):
            reader = Reader(stack.gateway, http, kind, REQUESTS[kind])
            found = await reader.answer()
            assert not reader.came_again
            return found

        async def log():
            async with channel(stack.gateway) as own:
                query = headrace_pb2.QueryPayloadsRequest(page_size=1)
                assert [r async for r in headrace_pb2_grpc.PayloadLogStub(own).Query(query, timeout=60)]

        known = {kind: await answer(kind) for kind in REQUESTS}
        settings = {"predictor": PACE | {"PREDICTOR_MAX_CONTEXT": "700"}, "logger": {}}
        rolled = asyncio.create_task(stack.roll(stack.settings, settings))
        rounds = 0

        async def again(kind):
            nonlocal rounds
            while not rolled.done() or rounds < 10:
                if kind in REQUESTS:
                    assert await answer(kind) == known[kind]
                elif kind == "log":
                    await log()
                else:
                    await infer(stack.gateway, tensors, authority="predictor")
                rounds += 1

        await asyncio.gather(*map(again, (*REQUESTS, "a long stream", "tensors", "log")))
        await rolled
    assert [name for name, pid in before.items() if stack.pid(name) == pid] == ["envoy"]
    # The new predictor has the new setting.
    too_long = headrace_pb2.GenerateRequest(model="storyteller", prompt="Once " * 500, max_tokens=400)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with channel(stack.gateway) as own:
            await headrace_pb2_grpc.TextGenerationStub(own).Generate(too_long, timeout=60).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
