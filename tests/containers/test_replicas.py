"""`--scale predictor=2` balances at once; the kill of a replica fails no unary call."""

import asyncio
import os

import pytest

from tests.containers.calls import INFER_IDS, INFER_TEXT, load
from tests.system.calls import statistics
from tests.waiting import until


async def test_replicas_share_the_work_and_one_may_die(stack):
    with stack.timed("up --scale predictor=2"):
        await stack.compose_beside("up", "--wait", "--no-recreate", "--scale", "predictor=2")
    try:
        replicas = stack.containers("predictor")
        assert len(replicas) == 2

        async def served():
            addresses = [f"{replica.addresses[0]}:9000" for replica in replicas]
            counted = await asyncio.gather(*(statistics(address, "normalizer") for address in addresses))
            return [model.inference_count for model in counted]

        kinds = (INFER_IDS, INFER_TEXT)
        async with load(stack.gateway, kinds, callers=4) as seen:

            async def all_serve():
                return min(await served()) >= 20

            with stack.timed("until each of two replicas has served 20 calls"):
                await until(all_serve)
            if os.geteuid() != 0:
                pytest.skip("only root may kill -9 a container's process")
            counted = len(seen.outcomes)
            with stack.timed("kill -9 of one of two replicas: healthy again"):
                await until(replicas[0].kill_9(), timeout_s=120)
            # The other one served meanwhile, and the restarted one takes its share again.
            assert len(seen.outcomes) > counted + 100
            await until(all_serve)
        assert not seen.errors(*kinds), [(o.kind.name, o.error) for o in seen.errors(*kinds)]
        print(f"{len(seen.outcomes)} unary calls, no error; served by the two: {await served()}")
    finally:
        await stack.compose_beside("up", "--wait", "--no-recreate", "--scale", "predictor=1")
