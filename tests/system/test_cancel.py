"""A client that disconnects stops the engine: no further step for its sequence, through two Envoy hops."""

import asyncio

import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import PACE, channel, generate, leave_http, statistics
from tests.waiting import until

LONG = {"model": "storyteller", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "pace": PACE}


async def ended(stack):
    """The number of requests that have ended in the engine, in any way."""
    return (await statistics(stack.addresses["predictor-0"], "storyteller")).inference_stats.queue.count


async def steps(stack):
    return (await statistics(stack.addresses["predictor-0"], "storyteller")).execution_count


async def by_grpc(gateway):
    async with channel(gateway) as open_channel:
        call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(headrace_pb2.GenerateRequest(**LONG))
        for _ in range(3):
            await call.read()
        call.cancel()


async def by_http(gateway):
    await asyncio.to_thread(leave_http, gateway, "/v1/completions", {**LONG, "stream": True})


@pytest.mark.parametrize("go_away", [by_grpc, by_http])
async def test_a_cancelled_stream_gets_no_further_step(stack, go_away):
    ended_before, steps_before = await ended(stack), await steps(stack)
    await go_away(stack.gateway)

    async def has_ended():
        return await ended(stack) > ended_before

    await until(has_ended)
    steps_at_end = await steps(stack)
    assert 1 <= steps_at_end - steps_before < 500

    # The engine steps only for the next request.
    await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=5, ignore_eos=True)
    assert await steps(stack) == steps_at_end + 5
