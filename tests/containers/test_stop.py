"""`docker compose stop` during streams: each ends as it should have, and every process by itself."""

import asyncio
import json

from tests.containers.calls import channel, generate

STREAMS = 6
TOKENS = 250


async def test_streams_end_before_their_containers_do(stack):
    containers = {
        service: stack.container(service)
        for service in json.loads(stack.compose("config", "--format", "json"))["services"]
    }
    async with channel(stack.gateway) as open_channel:
        started = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(generate(open_channel, TOKENS, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        with stack.timed(f"stop during {STREAMS} streams"):
            await stack.compose_beside("stop")
        # Raises where a stream broke or lost its end.
        await asyncio.gather(*streams)
    states = {service: container.facts["State"] for service, container in containers.items()}
    assert {service: state["ExitCode"] for service, state in states.items()} == dict.fromkeys(states, 0)
    assert not [service for service, state in states.items() if state["OOMKilled"]]
    with stack.timed("start again"):
        stack.compose("up", "--wait")
