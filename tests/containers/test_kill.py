"""`kill -9` of each container's main process, under a light load of every kind of call."""

import asyncio
import os
import re
import time
import urllib.request

import grpc
import pytest

from tests.containers.calls import GENERATE, KINDS, channel, generate, load
from tests.support.full import usually
from tests.waiting import until

HANGS_S = 45.0  # Calls may wait 30 s for a predictor.
SERVICES = ("logger", "predictor", "transformer", "envoy")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may kill -9 a container's process")


def started_at(predictor) -> float:
    """The start time of the process, from its page of metrics."""
    with urllib.request.urlopen(f"http://{predictor.addresses[0]}:9100/metrics", timeout=60) as page:
        found = re.search(r"^process_start_time_seconds (\S+)", page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


# The others have the same restart policy, and no call passes them.
@pytest.mark.parametrize("service", usually(SERVICES, (*SERVICES, "jaeger", "locust")))
async def test_a_killed_container_is_restarted_and_only_its_own_calls_fail(stack, service):
    container = stack.container(service)
    before = started_at(container) if service == "predictor" else 0.0
    async with load(stack.gateway, KINDS) as seen, channel(stack.gateway) as open_channel:
        await until(lambda: seen.succeeded_since(0))
        started = asyncio.Event()
        # Longer than a kill takes on a busy machine.
        stream = asyncio.create_task(generate(open_channel, 200, started, pace=40))
        await started.wait()
        killed = time.monotonic()
        with stack.timed(f"kill -9 {service}: healthy again"):
            await until(container.kill_9(), timeout_s=120)
        (broken,) = await asyncio.gather(stream, return_exceptions=True)
        with stack.timed(f"kill -9 {service}: every kind of call went well again"):
            back = time.monotonic()
            await until(lambda: seen.succeeded_since(back))

    if service == "predictor":
        # deploy/observability/alerts.yaml counts restarts by this metric.
        assert started_at(container) > before
    mine = tuple(kind for kind in KINDS if service in kind.passes)
    ended = [outcome for outcome in seen.outcomes if outcome.began + outcome.seconds > killed]
    errors = [outcome for outcome in seen.outcomes if outcome.error is not None]
    details = [(outcome.kind.name, outcome.began - killed, outcome.seconds, outcome.error) for outcome in errors]
    assert all(outcome.kind in mine and outcome in ended for outcome in errors), details
    ended_as = {grpc.StatusCode.UNAVAILABLE}
    if service == "transformer":
        # Envoy resets a stream whose answer had begun, with this status only.
        ended_as.add(grpc.StatusCode.INTERNAL)
    assert {outcome.error.code() for outcome in errors} <= ended_as, details
    assert max(outcome.seconds for outcome in ended) < HANGS_S
    # A stream survives its predictor: the next one continues it.
    if GENERATE in mine and service != "predictor":
        assert isinstance(broken, grpc.aio.AioRpcError)
        assert broken.code() in ended_as, broken
    else:
        assert broken is None
