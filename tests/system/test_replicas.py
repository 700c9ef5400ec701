"""Several predictors share the work; a killed one is replaced by the others and restarted.

In development mode the predictor of a request can be killed by name; otherwise the method neither exists nor is
listed.
"""

import grpc
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.status import code_of
from tests.system.calls import channel, each, generate, rest

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
        return await stub.KillPredictor(request, metadata=metadata)


async def listed(gateway):
    async with channel(gateway) as open_channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(open_channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await anext(aiter(stub.ServerReflectionInfo(each(request))))
        return [service.name for service in answer.list_services_response.service]


async def test_no_predictor_is_killed_by_accident(replicas):
    assert DEVELOPMENT in await listed(replicas.gateway)
    assert await code_of(kill(replicas.gateway, "mine")) is grpc.StatusCode.PERMISSION_DENIED
    assert (await rest(replicas.gateway, "POST", KILL, {"request_id": "mine"})).status == 403
    assert await code_of(kill(replicas.gateway, "nobody's", MEANT)) is grpc.StatusCode.NOT_FOUND


async def test_without_development_mode_no_predictor_is_killed(stack):
    assert DEVELOPMENT not in await listed(stack.gateway)
    assert await code_of(kill(stack.gateway, "mine", MEANT)) is grpc.StatusCode.UNIMPLEMENTED
    answer = await rest(stack.gateway, "POST", KILL, {"request_id": "mine"}, x_headrace_development="true")
    assert answer.status == 501
    async with channel(stack.addresses["predictor-0"]) as open_channel:
        predictor = headrace_pb2_grpc.PredictorDevelopmentStub(open_channel)
        request = headrace_pb2.KillPredictorRequest(request_id="mine")
        assert await code_of(predictor.Kill(request, metadata=(MEANT,))) is grpc.StatusCode.UNIMPLEMENTED
