"""`docker compose stop` during streams: each ends regularly, every process by itself, and the answers are
recorded in the next containers."""

import asyncio
import json
import uuid

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.containers.calls import channel, generate
from tests.system.calls import rest

STREAMS = 6
TOKENS, PACE = 250, 50


async def test_streams_end_before_their_containers_and_records_survive(stack):
    request_id = f"kept-{uuid.uuid4()}"
    body = {"model": "normalizer", "prompt": "date: 3 Mar 2021"}
    answer = await rest(stack.gateway, "POST", "/v1/completions", body, x_request_id=request_id)
    assert answer.json["choices"][0]["text"] == "2021-03-03"
    containers = {
        service: stack.container(service)
        for service in json.loads(stack.compose("config", "--format", "json"))["services"]
    }
    async with channel(stack.gateway) as open_channel:
        started = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(generate(open_channel, TOKENS, event, PACE)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        with stack.timed(f"stop during {STREAMS} streams"):
            await stack.compose_beside("stop")
        # Raises if a stream broke or lost its end.
        await asyncio.gather(*streams)
    states = {service: container.facts["State"] for service, container in containers.items()}
    assert {service: state["ExitCode"] for service, state in states.items()} == dict.fromkeys(states, 0)
    assert not [service for service, state in states.items() if state["OOMKilled"]]

    with stack.timed("down"):
        stack.compose("down")
    assert not stack.containers("logger")
    with stack.timed("up --wait, with everything built"):
        stack.compose("up", "--wait")
    async with channel(stack.gateway) as open_channel:
        query = headrace_pb2.QueryPayloadsRequest(request_id=request_id)
        [record] = [record async for record in headrace_pb2_grpc.PayloadLogStub(open_channel).Query(query)]
    assert record.text == "2021-03-03"
