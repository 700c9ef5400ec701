"""Reloading the gateway of a whole stack: no unary call fails and no stream breaks, over two reloads under load."""

import asyncio
import sys

import numpy as np

from headrace.oip.tensors import Tensor
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import channel, ids_request, infer, rest, text_of, text_request
from tests.waiting import until

# Paced, the first stream takes eight seconds or more, and a reload four. The second reload begins when the first stream
# ends, and the second stream continues for six seconds after that.
PACE = {"PACE_MS": "16"}
FIRST_TOKENS, SECOND_TOKENS = 500, 900
STREAM = {"model": "storyteller", "prompt": "Once upon a time", "ignore_eos": True, "temperature": 0}
CALLS_BETWEEN = 10


class Stream:
    """One `Generate` on its own connection, read in the background."""

    def __init__(self, gateway, tokens):
        self.responses = []
        self._tokens = tokens
        self._task = asyncio.create_task(self._read(gateway))

    async def _read(self, gateway):
        async with channel(gateway) as open_channel:
            stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
            request = headrace_pb2.GenerateRequest(**STREAM, max_tokens=self._tokens)
            async for response in stub.Generate(request):
                self.responses.append(response)

    @property
    def has_ended(self):
        return self._task.done()

    async def begun(self):
        await until(lambda: self.responses or self.has_ended)

    async def text(self):
        await self._task
        assert sum(len(response.token_ids) for response in self.responses) == self._tokens
        return text_of(self.responses)


async def test_two_reloads_under_load_fail_no_call(new_stack):
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
        environment={"predictor": PACE},
    )
    answered, stop = {}, asyncio.Event()
    ids = ids_request("storyteller", Tensor("input_ids", "INT64", np.array([5, 6, 7])), max_tokens=2)

    async def again_and_again(name, call):
        answered[name] = 0
        while not stop.is_set():
            await call()  # An error here fails the test.
            answered[name] += 1

    async def by_rest():
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
        answer = await rest(stack.gateway, "POST", "/v1/completions", body)
        assert answer.status == 200, answer.body

    calls = {
        "text by gRPC": lambda: infer(stack.gateway, text_request("storyteller", "Once", max_tokens=2)),
        "tensors by gRPC": lambda: infer(stack.gateway, ids, authority="predictor"),
        "text by REST": by_rest,
    }
    async with asyncio.TaskGroup() as group:
        for name, call in calls.items():
            group.create_task(again_and_again(name, call))

        async def each_answers():
            goal = {name: count + CALLS_BETWEEN for name, count in answered.items()}
            await until(lambda: all(answered[name] >= count for name, count in goal.items()), timeout_s=60)

        await until(lambda: len(answered) == len(calls))
        first = Stream(stack.gateway, FIRST_TOKENS)
        await first.begun()
        generations = [stack.pid("envoy")]

        await stack.reload()
        generations.append(stack.pid("envoy"))
        assert not first.has_ended
        await each_answers()
        # By now the transformer's own connection to the gateway is one of the new Envoy too.
        second = Stream(stack.gateway, SECOND_TOKENS)
        await second.begun()

        # The second reload waits for the end of the stream that the first generation still has.
        await stack.reload()
        generations.append(stack.pid("envoy"))
        assert first.has_ended
        assert not second.has_ended
        await each_answers()
        stop.set()
    assert len(set(generations)) == len(generations)
    assert (await second.text()).startswith(await first.text())
