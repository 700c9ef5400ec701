"""Several predictors share the work; a killed one is replaced by the others and restarted.

In development mode the predictor of a request can be killed by name; otherwise the method neither exists nor is
listed. Without any predictor the answer is 503, and every kind of readiness agrees.
"""

import asyncio
import signal
import sys
import time

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.health import serves
from tests.system.calls import channel, each, generate, rest, statistics
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
PREDICTORS = ("predictor-0", "predictor-1")
KILL = "/headrace/v1/development/kill"
DEVELOPMENT = "headrace.v1.Development"
MEANT = ("x-headrace-development", "true")


@pytest_asyncio.fixture(scope="module")
async def replicas(stacks):
    """Two predictors, in development mode."""
    async with stacks.use(models=MODELS, predictors=len(PREDICTORS), development=True) as started:
        yield started


async def tell(stack):
    return await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=20, ignore_eos=True)


async def kill(gateway, request_id, *metadata):
    async with channel(gateway) as open_channel:
        request = headrace_pb2.KillPredictorRequest(request_id=request_id)
        stub = headrace_pb2_grpc.DevelopmentStub(open_channel)
        return await stub.KillPredictor(request, metadata=metadata, timeout=30)


async def listed(gateway):
    async with channel(gateway) as open_channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(open_channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await anext(aiter(stub.ServerReflectionInfo(each(request), timeout=30)))
        return [service.name for service in answer.list_services_response.service]


async def test_readiness_does_not_flap_while_one_predictor_hangs(replicas):
    async def both_known():
        index = await rest(replicas.gateway, "POST", "/v2/repository/index", {})
        return [(model["state"], model.get("reason", "")) for model in index.json] == [("READY", "")]

    async def ready():
        answer = await rest(replicas.gateway, "GET", "/v2/health/ready")
        model = await rest(replicas.gateway, "GET", "/v2/models/storyteller/ready")
        return answer.status, model.status

    await until(both_known)  # Not only ready: the transformer has heard both.
    await replicas.kill("predictor-1", signal.SIGSTOP)
    try:
        end = time.monotonic() + 6
        while time.monotonic() < end:
            assert await ready() == (200, 200)
            assert await serves(replicas.gateway, "ready")
    finally:
        await replicas.kill("predictor-1", signal.SIGCONT)
    await until(lambda: serves(replicas.addresses["predictor-1"], "ready"))


async def test_work_is_shared(replicas):
    async def both_work():
        # The gateway probes each predictor once a second: it may notice the second one a little later than the first.
        await asyncio.gather(*(tell(replicas) for _ in range(8)))
        models = [await statistics(replicas.addresses[name], "storyteller") for name in PREDICTORS]
        return all(model.inference_count > 0 for model in models)

    await until(both_work)


async def test_no_predictor_is_killed_by_accident(replicas):
    assert DEVELOPMENT in await listed(replicas.gateway)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(replicas.gateway, "mine")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert (await rest(replicas.gateway, "POST", KILL, {"request_id": "mine"})).status == 403
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(replicas.gateway, "nobody's", MEANT)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_without_development_mode_no_predictor_is_killed(stack):
    assert DEVELOPMENT not in await listed(stack.gateway)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(stack.gateway, "mine", MEANT)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    answer = await rest(stack.gateway, "POST", KILL, {"request_id": "mine"}, x_headrace_development="true")
    assert answer.status == 501
    async with channel(stack.addresses["predictor-0"]) as open_channel:
        predictor = headrace_pb2_grpc.PredictorDevelopmentStub(open_channel)
        request = headrace_pb2.KillPredictorRequest(request_id="mine")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await predictor.Kill(request, metadata=(MEANT,), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def readiness(gateway, open_channel):
    """Readiness by health, ServerReady, ModelReady and REST, and the health of the process."""
    stub, health = GRPCInferenceServiceStub(open_channel), health_pb2_grpc.HealthStub(open_channel)
    ready, process, server, model, rest_server, rest_model = await asyncio.gather(
        health.Check(health_pb2.HealthCheckRequest(service="ready")),
        health.Check(health_pb2.HealthCheckRequest(service="")),
        stub.ServerReady(pb.ServerReadyRequest()),
        stub.ModelReady(pb.ModelReadyRequest(name="storyteller")),
        rest(gateway, "GET", "/v2/health/ready"),
        rest(gateway, "GET", "/v2/models/storyteller/ready"),
    )
    serving = health_pb2.HealthCheckResponse.SERVING
    values = {ready.status == serving, server.ready, model.ready, rest_server.status == 200, rest_model.status == 200}
    return frozenset(values), process.status == serving


async def test_without_a_predictor_the_answer_is_503_after_the_wait_and_every_kind_of_readiness_agrees(
    new_stack, tmp_path
):
    away = tmp_path / "away"
    stack = await new_stack(
        models=MODELS,
        commands={"predictor": (sys.executable, "-m", "tests.system.slow_predictor")},
        environment={
            "predictor": {"SLOW_MS": "0", "AWAY": str(away)},
            "transformer": {"TRANSFORMER_PREDICTOR_WAIT": "0.2"},
        },
    )
    seen = set()

    async with channel(stack.gateway) as open_channel:

        async def is_reported_ready(ready):
            answers = await readiness(stack.gateway, open_channel)
            # Six calls do not happen at one moment: answers count if they are the same twice.
            if answers == await readiness(stack.gateway, open_channel):
                seen.add(answers)
            return answers[0] == {ready}

        await until(lambda: is_reported_ready(True))
        away.touch()
        await stack.kill("predictor-0")
        answer, _ = await asyncio.gather(
            rest(stack.gateway, "POST", "/v1/completions", {"model": "storyteller", "prompt": "Once"}),
            until(lambda: is_reported_ready(False), 60),
        )
        assert answer.status == 503
        assert answer.headers["x-failed-hop"] == "predictor"
        assert answer.pieces[-1][0] < 5
        ready = await rest(stack.gateway, "GET", "/v2/health/ready")
        assert (ready.status, ready.json) == (503, {"ready": False})
        assert (await rest(stack.gateway, "GET", "/health")).status == 503
        away.unlink()
        await until(lambda: is_reported_ready(True), 60)
    # The transformer itself serves all the time.
    assert seen == {(frozenset({True}), True), (frozenset({False}), True)}

    await stack.wait_ready(timeout_s=30)
    assert await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=3)
    # A request does not need the name of the only model.
    for body in ({"prompt": "Once"}, {"prompt": "Once", "model": ""}):
        answer = await rest(stack.gateway, "POST", "/v1/completions", {**body, "max_tokens": 2})
        assert (answer.status, answer.json["model"]) == (200, "storyteller")
    assert (await rest(stack.gateway, "GET", "/tokenizer_info")).json["eos_token"] == "</s>"
