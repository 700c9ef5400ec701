"""The stack on Docker Swarm starts as its page has it, and updates under load fail no call: 8 minutes on two cores."""

import asyncio
import collections
import json

import grpc
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.containers.calls import KINDS, QUERY, channel, load
from tests.containers.stack import FILES, docker
from tests.containers.swarm import SwarmStack
from tests.system.calls import STREAMS, text_of
from tests.waiting import until

pytestmark = pytest.mark.full  # The short form: tests/unit/test_swarm_stack.py, test_compose_files.py.

PACE = 5  # Tokens of a stream in a second, the fewest: they leave two cores time for tasks that start.
DEADLINE_S = 300  # So long that the transformer never refuses a stream because the machine is slow.
PROMPTS = [
    {"model": "storyteller", "prompt": "Once upon a time", "seed": seed, "temperature": 0.9, "max_tokens": 100}
    for seed in range(STREAMS)
]
# Queries are the operator's: they need an admin's key here.
CALLS = tuple(kind for kind in KINDS if kind is not QUERY)


@pytest.fixture(scope="module")
def swarm(built, tmp_path_factory):
    if json.loads(docker("info", "--format", "{{json .Swarm.LocalNodeState}}")) != "inactive":
        pytest.skip("the engine is part of a swarm already, whose nodes and services a test must not change")
    started = SwarmStack(tmp_path_factory.mktemp("wheelhouse"))
    started.begin()
    try:
        with built.timed("docker stack deploy, until a generation would work"):
            started.deploy()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
async def undisturbed(swarm):
    return await asyncio.gather(*(answer(swarm, prompt) for prompt in PROMPTS))


async def answer(swarm, prompt, **fields):
    """The text of one stream over a connection of its own."""
    request = headrace_pb2.GenerateRequest(ignore_eos=True, **prompt, **fields)
    async with channel(swarm.gateway) as own:
        responses = headrace_pb2_grpc.TextGenerationStub(own).Generate(request, timeout=DEADLINE_S)
        return text_of([response async for response in responses])


def test_a_task_has_the_limits_of_its_container_in_compose_and_only_the_gateways_port_is_published(swarm, built):
    services = json.loads(built.compose("config", "--format", "json", files=FILES))["services"]
    for name in services.keys() - {"locust"}:
        host = swarm.containers(name)[0].facts["HostConfig"]
        assert host["Memory"] == int(services[name]["mem_limit"])
        assert host["PidsLimit"] == services[name]["pids_limit"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        (folder,) = (mount for mount in host["Mounts"] if mount["Type"] == "tmpfs")
        assert (folder["Target"], folder["TmpfsOptions"]["SizeBytes"]) == ("/tmp", 64 << 20)
    published = [
        (name, port["TargetPort"], port["PublishMode"])
        for name in services.keys() - {"locust"}
        for port in swarm.service(name)["Endpoint"].get("Ports", [])
    ]
    assert published == [("envoy", 8080, "host")]


@pytest.mark.parametrize("service", ["predictor", "transformer"])
async def test_an_update_under_64_streams_fails_no_call_and_changes_no_text(swarm, built, undisturbed, service):
    before = {container.id for container in swarm.containers(service)}
    updated = asyncio.Event()
    texts, errors = 0, []

    async def stream(prompt, expected):
        nonlocal texts
        try:
            while not updated.is_set():
                assert await answer(swarm, prompt, pace=PACE) == expected
                texts += 1
        except grpc.aio.AioRpcError as error:
            errors.append(error)

    async with asyncio.TaskGroup() as streams, load(swarm.gateway, CALLS) as seen:
        for prompt, expected in zip(PROMPTS, undisturbed, strict=True):
            streams.create_task(stream(prompt, expected))
        with built.timed(f"docker service update {service}, under {STREAMS} streams"):
            state = await asyncio.to_thread(swarm.update, service, "--force")
        updated.set()
    assert state == "completed", swarm.logs(service)
    assert not errors, errors
    assert not seen.errors(*CALLS), [(outcome.kind.name, outcome.error) for outcome in seen.errors(*CALLS)]
    assert len(before) == 2
    assert not before & {container.id for container in swarm.containers(service)}
    print(f"{texts} streams and {len(seen.outcomes)} other calls, no error")


async def test_an_update_of_the_logger_fails_no_call_and_loses_no_record(swarm):
    ids = []

    async def stream():
        while not updated.is_set():
            ids.append(f"logged-{len(ids)}")
            await answer(swarm, PROMPTS[0], request_id=ids[-1])

    updated = asyncio.Event()
    async with asyncio.TaskGroup() as streams, load(swarm.gateway, CALLS) as seen:
        for _ in range(4):
            streams.create_task(stream())
        assert await asyncio.to_thread(swarm.update, "logger", "--force") == "completed"
        updated.set()
    assert not seen.errors(*CALLS), [(outcome.kind.name, outcome.error) for outcome in seen.errors(*CALLS)]

    def recorded():
        lines = swarm.execute(
            "logger", "python", "-m", "headrace_logger", "export", "--format", "jsonl", "--output", "-"
        )
        found = collections.Counter(json.loads(line)["request_id"] for line in lines.splitlines())
        return {name: count for name, count in found.items() if name.startswith("logged-")}

    await until(lambda: asyncio.to_thread(lambda: recorded() == dict.fromkeys(ids, 1)))
    print(f"{len(ids)} streams, each recorded once")


async def test_an_update_to_tasks_that_do_not_start_is_rolled_back_and_fails_no_call(swarm):
    before = {container.id for container in swarm.containers("predictor")}
    async with load(swarm.gateway, CALLS) as seen:
        state = await asyncio.to_thread(swarm.update, "predictor", "--env-add", "PREDICTOR_LOG_LEVEL=LOUD")
    assert state == "rollback_completed"
    assert not seen.errors(*CALLS)
    assert before == {container.id for container in swarm.containers("predictor")}
