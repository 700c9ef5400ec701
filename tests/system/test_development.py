"""In development mode the predictor of a request can be killed by name; otherwise nobody can, nor is it listed."""

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace_protos import millrace_pb2, millrace_pb2_grpc
from tests.system.calls import channel, each, rest
from tests.waiting import until

PATH = "/millrace/v1/development/kill"
SERVICE = "millrace.v1.Development"
MEANT = ("x-millrace-development", "true")


async def kill(gateway, request_id, *metadata):
    async with channel(gateway) as open_channel:
        request = millrace_pb2.KillPredictorRequest(request_id=request_id)
        stub = millrace_pb2_grpc.DevelopmentStub(open_channel)
        return await stub.KillPredictor(request, metadata=metadata, timeout=30)


async def listed(gateway):
    async with channel(gateway) as open_channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(open_channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await anext(aiter(stub.ServerReflectionInfo(each(request), timeout=30)))
        return [service.name for service in answer.list_services_response.service]


async def test_the_predictor_that_has_the_request_dies_and_no_other(new_stack):
    stack = await new_stack(models="storyteller=models/storyteller", predictors=2, development=True)
    predictors = [name for name in stack.names if name.startswith("predictor")]
    before = {name: stack.pid(name) for name in predictors}
    assert SERVICE in await listed(stack.gateway)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(stack.gateway, "mine")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    refused = await rest(stack.gateway, "POST", PATH, {"request_id": "mine"})
    assert refused.status == 403
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(stack.gateway, "nobody's", MEANT)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    async with channel(stack.gateway) as open_channel:
        request = millrace_pb2.GenerateRequest(
            model="storyteller", prompt="Once", request_id="mine", max_tokens=900, ignore_eos=True
        )
        stream = millrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request)
        await stream.read()
        answer = await rest(stack.gateway, "POST", PATH, {"request_id": "mine"}, x_millrace_development="true")
        assert (answer.status, answer.json) == (200, {})
        stream.cancel()

    def started_again():
        try:
            return sum(stack.pid(name) != before[name] for name in predictors) == 1
        except ProcessLookupError:
            return False

    await until(started_again)


async def test_without_development_mode_nobody_is_killed(stack):
    assert SERVICE not in await listed(stack.gateway)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kill(stack.gateway, "mine", MEANT)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    answer = await rest(stack.gateway, "POST", PATH, {"request_id": "mine"}, x_millrace_development="true")
    assert answer.status == 501
    async with channel(stack.addresses["predictor-0"]) as open_channel:
        predictor = millrace_pb2_grpc.PredictorDevelopmentStub(open_channel)
        request = millrace_pb2.KillPredictorRequest(request_id="mine")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await predictor.Kill(request, metadata=(MEANT,), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
