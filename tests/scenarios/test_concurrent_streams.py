"""`concurrent_streams`: hundreds of streams whose callers leave, time out or read slowly affect no other stream.

200 at a time: no crash, no error for the others, all blocks of the KV cache free again. 200 streams, or 10,000 with
FULL=1, after which no process is larger than before. The seed is printed; SEED chooses it.
"""

import asyncio
import os
import random
import sys
from collections import Counter

import pytest

from tests.chaos.load import Client
from tests.chaos.memory import CACHES, SMALL_CACHES, resident_bytes
from tests.chaos.oracle import Oracle
from tests.chaos.requests import Request
from tests.scenarios.crowd import stories_of
from tests.support.full import FULL
from tests.waiting import until

STREAMS = 10_000 if FULL else 200
WARM_UP = 500 if FULL else 0
AT_ONCE = 200
TOKENS = (8, 24)
MANNERS = {"reads": 5, "reads slowly": 1, "leaves": 2, "has a deadline": 2}
SEED = os.environ.get("SEED") or str(random.randrange(1 << 32))
MOST_GROWTH = 1.05


def request_of(number, stories):
    dice = random.Random(f"{SEED}/{number}")
    (manner,) = dice.choices(list(MANNERS), list(MANNERS.values()))
    # Some limits are impossible: with merely short ones requests would be refused early, once the load is known.
    limit = dice.uniform(0.01, dice.choice((0.1, 2))) if manner == "has a deadline" else 100
    way = dice.choice(("Generate", "ModelStreamInfer"))
    return Request(f"stream-{number}", way, dice.choice(stories), manner, pieces=dice.randrange(1, 12), timeout_s=limit)


@pytest.mark.timeout(900 if FULL else 300)
async def test_streams_that_end_in_every_way_leave_no_resources_behind(new_stack, tmp_path):
    print(f"SEED={SEED}")
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": {"FAULTS": str(tmp_path), **SMALL_CACHES}},
    )
    port = stack.addresses["predictor-0"].rpartition(":")[2]
    processes = {name: stack.pid(name) for name in stack.names}
    stories = [story for tokens in TOKENS for story in stories_of(tokens)]
    oracle, outcomes, wrong = Oracle(), Counter(), []

    def all_blocks_are_free():
        return (tmp_path / f"blocks-{port}").read_text().split() == ["0", "0"]

    async with Client(stack.gateway, connections=16) as client:
        await oracle.record_answers(client, stories)

        async def send(numbers):
            async def caller():
                for number in numbers:
                    call = await client.send(request_of(number, stories))
                    verdict = oracle.judge(call, ())
                    outcomes[verdict.outcome] += 1
                    if verdict.outcome == "wrong":
                        wrong.append(f"{call.request}: {verdict.reason}")

            await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
            await until(all_blocks_are_free)

        await send(iter(range(WARM_UP)))
        before = resident_bytes(stack)
        await send(iter(range(WARM_UP, WARM_UP + STREAMS)))
        after = resident_bytes(stack)

    print(dict(outcomes))
    assert not wrong, "\n".join([f"{len(wrong)} of {outcomes.total()}", *wrong[:10]])
    assert min(outcomes[outcome] for outcome in ("right", "left", "late")) > 0
    assert {name: stack.pid(name) for name in stack.names} == processes
    growth = {name: f"{before[name] / 1e6:.0f} to {after[name] / 1e6:.0f} MB" for name in before}
    print(growth)
    if FULL:
        assert all(after[name] <= MOST_GROWTH * before[name] + CACHES.get(name, 0) for name in before), growth
