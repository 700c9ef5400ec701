"""Streams see only a short pause while all predictors are restarted, and soon continue after a kill in front of them.

Streams of 200 tokens, greedy and sampled, in fp32: 24 at a time, with FULL=1 64 for a minute. The expected answers were
recorded before, from the same stack. Each test prints the lengths of the pauses. Kills of predictors, under every kind
of request, are those of test_kinds_under_kills.py; predictors that are stopped or alone those of
tests/system/test_resume.py.
"""

import asyncio
import signal
import sys
import time

import httpx2
import pytest
import pytest_asyncio

from loadtest.prompts import EXAMPLES
from tests.chaos.load import Client
from tests.chaos.oracle import Oracle
from tests.scenarios.crowd import Crowd, stories_of
from tests.slow.kinds_of_requests import COMPLETIONS, Reader
from tests.support.full import FULL
from tests.system.calls import serves
from tests.waiting import until

SECONDS = 60 if FULL else 6
CALLERS = 64 if FULL else 24
TOKENS = 200
PREDICTORS = 3
PACE_MS = 30
SILENCE_LIMIT_S = 2
BACK_S = 60
PACED, PACED_S = 10, 12  # Tokens a second, and how long a stream has run before the kill.
THROUGH_S = 15
# The longest pause of a rolling restart. The promise is a second, on a machine with a core for each predictor.
MOST_PAUSE_S = 1 if FULL else 10

pytestmark = pytest.mark.timeout(600 if FULL else 240)


def arguments(folder):
    """Arguments of a stack whose paced model leaves the processor to others, so that restarts are fast."""
    # Each predictor has room for all streams: the pauses are not those of a queue.
    room = {"PREDICTOR_MAX_RUNNING": str(CALLERS)}
    predictor = {"FAULTS": str(folder), "SLOW_MS": str(PACE_MS), **room}
    return {
        "commands": {"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        "environment": {
            "predictor": predictor,
            "transformer": {
                "TRANSFORMER_SILENCE_LIMIT": str(SILENCE_LIMIT_S),
                # On a busy machine predictors restart slowly.
                "TRANSFORMER_PREDICTOR_START_WAIT": "120",
            },
        },
    }


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    faults = arguments(tmp_path_factory.mktemp("faults"))
    async with stacks.use(models="storyteller=models/storyteller", predictors=PREDICTORS, **faults) as started:
        yield started


@pytest_asyncio.fixture
async def oracle(stack):
    """The right answers, recorded before the test; all predictors serve then."""
    known = Oracle()
    await stack.wait_ready(BACK_S)
    async with Client(stack.gateway) as client:
        await known.record_answers(client, stories_of(TOKENS))
    return known


def print_pauses(what, crowd):
    """Prints the longest pause and the 99th percentile; returns the latter."""
    pauses = crowd.pauses_s()
    most = pauses[int(0.99 * (len(pauses) - 1))]
    print(f"{what}: {len(pauses)} streams, longest pause {pauses[-1]:.2f} s, p99 {most:.2f} s")
    return most


@pytest.mark.full  # The short form: tests/system/test_resume.py, SIGTERM.
async def test_restarting_all_predictors_one_by_one_causes_no_error_and_short_pauses(stack, oracle):
    end, rounds = time.monotonic() + SECONDS, 0
    async with Client(stack.gateway) as client:
        async with Crowd(client, stories_of(TOKENS), CALLERS) as crowd:
            await until(crowd.all_have_moved, BACK_S)
            while not rounds or (FULL and time.monotonic() < end):
                rounds += 1
                for name in [name for name in stack.names if name.startswith("predictor")]:
                    await stack.kill(name, signal.SIGTERM)
                    # The gateway checks once a second which predictors are ready.
                    await stack.wait_ready(BACK_S)
        crowd.all_right(oracle)
    assert print_pauses(f"{rounds} rolling restarts", crowd) <= MOST_PAUSE_S


@pytest.mark.parametrize("victim", ["transformer", "envoy"])
async def test_clients_that_come_again_after_a_kill_in_front_are_through_soon(new_stack, victim):
    stack = await new_stack(models="storyteller=models/storyteller", predictors=2)
    limits = httpx2.Limits(max_keepalive_connections=0)

    def bodies(**pace):
        fixed = {"model": "storyteller", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.9, "stream": True}
        return [{**fixed, "prompt": EXAMPLES[n % len(EXAMPLES)], "seed": n, **pace} for n in range(CALLERS)]

    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=None, limits=limits) as http:

        def readers(bodies):
            return [Reader(stack.gateway, http, f"stream {n}", (COMPLETIONS, body)) for n, body in enumerate(bodies)]

        known = await asyncio.gather(*(reader.answer() for reader in readers(bodies())))
        reading = readers(bodies(pace=PACED))
        answers = [asyncio.create_task(reader.answer()) for reader in reading]
        await asyncio.sleep(PACED_S)
        killed = time.monotonic()
        await stack.kill(victim)
        await until(lambda: serves(stack.gateway, "ready"), BACK_S)
        back = time.monotonic()
        await until(lambda: all(reader.latest > back for reader in reading), BACK_S)
        through = time.monotonic()
        got = await asyncio.gather(*answers)
    print(f"{victim} away for {back - killed:.1f} s, {CALLERS} clients through {through - back:.1f} s later")
    assert [answer[:2] for answer in got] == [answer[:2] for answer in known]  # Without the id.
    assert through - back < THROUGH_S
