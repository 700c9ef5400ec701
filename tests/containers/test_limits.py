"""Few descriptors and a predictor without memory, under eight streams: all returns by itself.

Full disks are those of tests/slow/test_machine_faults.py.
"""

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.containers.calls import channel, generate
from tests.containers.stack import FILES, ComposeStack
from tests.waiting import until

# The short forms: test_both_leave_descriptors_for_the_connections_to_services in tests/process/test_gateway_config.py,
# and the kill of a predictor in test_kill.py.
pytestmark = pytest.mark.full

STREAMS, TOKENS = 8, 40
SECONDS = 20
BACK_S = 180.0  # The engine restarts a container after a minute at most.
SERVICES = ("transformer", "predictor", "logger", "envoy")
DESCRIPTORS = 256
LITTLE_MEMORY = 160 << 20  # Less than torch needs.


@pytest.fixture(scope="module")
def stack(built, tmp_path_factory):
    """A stack with few descriptors and two predictors."""
    folder = tmp_path_factory.mktemp("limits")
    limits = f"ulimits: {{nofile: {DESCRIPTORS}}}"
    lines = [f"  {name}: {{{limits}{', scale: 2' * (name == 'predictor')}}}" for name in SERVICES]
    overlay = folder / "small.yaml"
    overlay.write_text("\n".join(["services:", *lines]) + "\n")
    (folder / "wheels").mkdir()
    started = ComposeStack(folder / "wheels", (*FILES, str(overlay)), "headrace-limits")
    try:
        started.compose("up", "--wait", "--no-build", *SERVICES)
        yield started
    finally:
        started.compose("down", "--volumes", "--remove-orphans")


@asynccontextmanager
async def streaming(stack, outcomes):
    """Streams one after the other by each of STREAMS callers; `outcomes` gets when each began, and its error.

    Yields a check whether as many were answered as there are callers, of those that began after a time.
    """
    enough = asyncio.Event()

    async def stream():
        async with channel(stack.gateway) as open_channel:
            while not enough.is_set():
                began = time.monotonic()
                try:
                    await generate(open_channel, TOKENS, asyncio.Event())
                    outcomes.append((began, None))
                except Exception as error:  # Judged below.
                    outcomes.append((began, error))
                    await asyncio.sleep(0.2)

    def served_since(since):
        return sum(began > since and error is None for began, error in outcomes) >= STREAMS

    async def all_are_served():
        since = time.monotonic()
        await until(lambda: served_since(since), BACK_S)

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    try:
        await all_are_served()
        yield all_are_served
    finally:
        enough.set()
        await asyncio.gather(*streams)


async def all_healthy(stack):
    for service in SERVICES:
        for container in stack.containers(service):
            await until(partial(asyncio.to_thread, container.is_healthy), BACK_S)


async def test_more_callers_than_descriptors_are_nobody_elses_trouble(stack):
    outcomes = []
    host, _, port = stack.gateway.rpartition(":")
    async with streaming(stack, outcomes) as all_are_served:
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2 * DESCRIPTORS)]
        await asyncio.sleep(SECONDS)
        await all_are_served()
        for _, writer in idle:
            writer.close()
    assert not [error for _, error in outcomes if error is not None]
    await all_healthy(stack)
    assert f"only {DESCRIPTORS} open files and connections are allowed" in stack.compose("logs", "envoy")


async def test_a_predictor_without_memory_is_nobody_elses_trouble(stack):
    outcomes = []
    poor, _ = stack.containers("predictor")
    before = poor.facts["HostConfig"]["Memory"]
    async with streaming(stack, outcomes) as all_are_served:
        poor.kill_9()
        await until(partial(asyncio.to_thread, poor.limit_memory, LITTLE_MEMORY), BACK_S)
        limited = time.monotonic()
        while time.monotonic() < limited + 3 * SECONDS:
            await all_are_served()
        assert not await asyncio.to_thread(poor.is_healthy)
        assert await asyncio.to_thread(poor.limit_memory, before)
        await all_healthy(stack)
        await all_are_served()
    assert not [error for _, error in outcomes if error is not None]
