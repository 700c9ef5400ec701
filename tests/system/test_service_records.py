"""Predictors by the SRV records of a service: generations and tensors follow the records' hosts and ports."""

import asyncio
import json
import signal
import sys
import urllib.request
from contextlib import AsyncExitStack

import numpy as np
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor
from tests.support.service_records import HOST, SERVICE, service_server
from tests.system.calls import generate, ids_request, infer, rest, text_of
from tests.system.predictor_process import predictor_process
from tests.waiting import until

MODELS = "storyteller=models/storyteller"


@pytest_asyncio.fixture(scope="module")
async def predictors(tmp_path_factory):
    """Two predictors."""
    folder = tmp_path_factory.mktemp("predictors")
    async with AsyncExitStack() as running:
        starts = (
            running.enter_async_context(predictor_process(folder / f"{number}.log", MODELS=MODELS))
            for number in range(2)
        )
        yield await asyncio.gather(*starts)


def in_gateway(stack):
    """The ports of the gateway's predictors by Envoy's priority."""
    address = f"http://127.0.0.1:{stack.settings.gateway_admin_port}/clusters?format=json"
    clusters = json.loads(urllib.request.urlopen(address, timeout=60).read())["cluster_statuses"]
    (hosts,) = (cluster.get("host_statuses", []) for cluster in clusters if cluster["name"] == "predictor")
    return {host["address"]["socket_address"]["port_value"]: host.get("priority", 0) for host in hosts}


@pytest.mark.full  # The short form: tests/process/test_transformer_resolver.py.
async def test_the_stack_follows_the_records_of_a_service(new_stack, predictors):
    first, second = (int(predictor.target.rpartition(":")[2]) for predictor in predictors)
    async with service_server() as server:
        server.services[SERVICE] = [(0, HOST, first)]
        stack = await new_stack(
            models=MODELS,
            predictors=0,
            predictor_endpoints=SERVICE,
            environment={"transformer": {"NAME_SERVER_PORT": str(server.port)}},
            commands={"transformer": (sys.executable, "-m", "tests.system.named_transformer")},
        )

        async def knows(expected):
            listed = (await rest(stack.gateway, "GET", "/headrace/v1/predictors")).json["predictors"]
            return len(listed) == len(expected) and await asyncio.to_thread(in_gateway, stack) == expected

        async def works():
            text = await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=4)
            request = ids_request("storyteller", Tensor("input_ids", "INT64", np.array([5, 6, 7])), max_tokens=2)
            tensors = await infer(stack.gateway, request, authority="predictor")
            return bool(text_of(text)) and len(tensors["output_ids"].array) > 0

        assert await works()
        await until(lambda: knows({first: 0}))
        # Another priority is for when the first predictor is away.
        server.services[SERVICE].append((1, HOST, second))
        await until(lambda: knows({first: 0, second: 1}))
        names = {
            (await generate(stack.gateway, model="storyteller", prompt=f"{number}", max_tokens=1))[0].predictor
            for number in range(6)
        }
        assert names == {"predictor-0"}
        # No answer is no change; a port that has moved is.
        server.is_silent = True
        assert await works()
        server.is_silent = False
        server.services[SERVICE] = [(0, HOST, second)]
        await until(lambda: knows({second: 0}))
        assert await works()
        # The other one takes over when the first is gone.
        server.services[SERVICE].append((7, HOST, first))
        await until(lambda: knows({second: 0, first: 1}))
        predictors[1].process.send_signal(signal.SIGKILL)
        assert await works()
