"""Replacing every service of a running stack: no unary call fails and no stream breaks."""

import asyncio
import sys

import grpc
import numpy as np
import pytest

from headrace.oip.tensors import Tensor
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import channel, ids_request, infer, rest, text_of, text_request
from tests.waiting import until

pytestmark = pytest.mark.timeout(480)

# Paced, a stream takes ten seconds; a successor takes a few to load.
PACE = {"PACE_MS": "12"}
TOKENS = 650
STREAMS = 4
CALLS = 10


class Load:
    """Calls of every kind again and again, each on its own connection; errors are recorded."""

    def __init__(self, gateway):
        self._gateway = gateway
        self._stop = asyncio.Event()
        self.answered = {}
        self.failures = []
        ids = ids_request("storyteller", Tensor("input_ids", "INT64", np.array([5, 6, 7])), max_tokens=2)
        calls = {
            "text by gRPC": lambda: infer(gateway, text_request("storyteller", "Once", max_tokens=2)),
            "tensors by gRPC": lambda: infer(gateway, ids, authority="predictor"),
            "text by REST": self._complete,
            "events by REST": self._events,
            "the payload log": self._query,
        }
        self._tasks = [asyncio.create_task(self._again_and_again(name, call)) for name, call in calls.items()]

    async def _again_and_again(self, name, call):
        self.answered[name] = 0
        while not self._stop.is_set():
            try:
                await call()
            except (grpc.aio.AioRpcError, AssertionError, OSError) as error:
                self.failures.append((name, error))
            self.answered[name] += 1

    async def _complete(self):
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
        answer = await rest(self._gateway, "POST", "/v1/completions", body)
        assert answer.status == 200, answer.body

    async def _events(self):
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 8, "stream": True}
        answer = await rest(self._gateway, "POST", "/v1/completions", body)
        assert (answer.status, answer.events[-1]) == (200, "[DONE]"), answer.body

    async def _query(self):
        async with channel(self._gateway) as own:
            stub = headrace_pb2_grpc.PayloadLogStub(own)
            async for record in stub.Query(headrace_pb2.QueryPayloadsRequest(page_size=1), timeout=60):
                assert record.record_id or record.gateway

    async def goes_on(self):
        """Waits until each kind has been answered `CALLS` times more."""
        goal = {name: count + CALLS for name, count in self.answered.items()}
        await until(lambda: all(self.answered[name] >= count for name, count in goal.items()), timeout_s=240)

    async def end(self):
        self._stop.set()
        await asyncio.gather(*self._tasks)
        assert self.failures == []


async def story_of(gateway, tokens=TOKENS):
    """The text of one long `Generate`, which is greedy."""
    request = headrace_pb2.GenerateRequest(
        model="storyteller", prompt="Once upon a time", max_tokens=tokens, ignore_eos=True, temperature=0
    )
    async with channel(gateway) as own:
        responses = [r async for r in headrace_pb2_grpc.TextGenerationStub(own).Generate(request, timeout=300)]
    assert sum(len(response.token_ids) for response in responses) == tokens
    return text_of(responses)


async def test_a_roll_under_load_fails_no_call_and_applies_the_present_settings(new_stack):
    stack = await new_stack(
        predictors=2,  # They are replaced one by one.
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
        environment={"predictor": PACE},
    )
    before = {name: stack.pid(name) for name in stack.names}
    load = Load(stack.gateway)
    await load.goes_on()
    streams = [asyncio.create_task(story_of(stack.gateway)) for _ in range(STREAMS)]

    rolled = asyncio.create_task(
        stack.roll(stack.settings, {"predictor": PACE | {"PREDICTOR_MAX_CONTEXT": "700"}, "logger": {}})
    )
    await load.goes_on()
    await rolled
    assert [name for name, pid in before.items() if stack.pid(name) == pid] == ["envoy"]
    await load.goes_on()
    await load.end()
    texts = await asyncio.gather(*streams)
    assert texts == [texts[0]] * STREAMS
    # The new predictor has the new setting.
    too_long = headrace_pb2.GenerateRequest(model="storyteller", prompt="Once " * 500, max_tokens=400)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with channel(stack.gateway) as own:
            await headrace_pb2_grpc.TextGenerationStub(own).Generate(too_long, timeout=60).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
