"""A call of a model that does not need the transformer goes directly to a predictor; a caller can notice only the
shorter time."""

import grpc
import numpy as np
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.status import code_of, refusal
from tests.system.calls import channel, generate, hop_of, query, records, text_request, until_direct

MODELS = "storyteller=models/storyteller,identity=models/identity,quiet=models/identity,summary=models/identity"
RULES = {"TRANSFORMER_PAYLOAD_LOG": "all,quiet=off,summary=metadata"}
METHOD = "/inference.GRPCInferenceService/ModelInfer"


@pytest_asyncio.fixture(scope="module")
async def stack(stacks):
    async with stacks.use(models=MODELS, environment={"transformer": RULES}) as started:
        for model in ("identity", "quiet", "summary"):
            await until_direct(started.gateway, model)
        yield started


def request(model="identity", request_id="", numbers=(1, 2, 3)):
    made = pb.ModelInferRequest(model_name=model, id=request_id)
    add_input(made, Tensor("x", "INT64", np.array([numbers], np.int64)))
    return made


async def infer(gateway, message, **options):
    async with channel(gateway) as open_channel:
        return await GRPCInferenceServiceStub(open_channel).ModelInfer(message, **options)


def numbers_of(response):
    return decode_outputs(response)["x"].array.tolist()


async def test_the_predictor_writes_its_only_record(stack):
    response = await infer(stack.gateway, request(request_id="straight"))
    assert numbers_of(response) == [[1, 2, 3]]
    (record,) = await records(stack.gateway, request_id="straight")
    assert (record.model, record.status) == ("identity", "OK")
    assert record.protocol == "inference.GRPCInferenceService/ModelInfer"
    heads = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in (*record.inputs, *record.outputs)]
    assert heads == [("x", "INT64", [1, 3])] * 2
    assert record.trace_id


async def test_the_record_follows_the_transformers_rules(stack):
    await infer(stack.gateway, request("quiet", "unrecorded"))
    await infer(stack.gateway, request("summary", "summarised"))
    (record,) = await records(stack.gateway, request_id="summarised")
    assert (record.status, len(record.inputs), len(record.outputs)) == ("OK", 0, 0)
    assert [record for record in await query(stack.gateway, request_id="unrecorded") if record.model] == []


async def test_a_model_of_tensors_refuses_text(stack):
    raised = await refusal(generate(stack.gateway, model="identity", prompt="Once"))
    assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.details() == "model 'identity' takes tensors, not text; call it by ModelInfer"


async def test_a_model_that_takes_text_goes_through_the_transformer(stack):
    assert await hop_of(stack.gateway, "storyteller") == "transformer"
    response = await infer(stack.gateway, text_request("storyteller", "Tell me a story.", max_tokens=4))
    assert response.outputs[0].name == "text_output"


async def test_a_message_that_does_not_begin_with_the_models_name_is_answered_too(stack):
    name = pb.ModelInferRequest(model_name="identity").SerializeToString()
    rest = request("").SerializeToString()
    async with channel(stack.gateway) as open_channel:
        raw = open_channel.unary_unary(METHOD, response_deserializer=pb.ModelInferResponse.FromString)
        assert numbers_of(await raw(rest + name)) == [[1, 2, 3]]
        # The last value of a repeated field counts: the predictor does not have this model.
        await refusal(
            raw(request().SerializeToString() + pb.ModelInferRequest(model_name="x").SerializeToString()), "no model"
        )


async def test_the_gateways_mark_is_not_accepted_from_a_caller(stack):
    mark = (("x-headrace-direct", "true"),)
    async with channel(stack.gateway, "predictor") as open_channel:
        predictor = GRPCInferenceServiceStub(open_channel)
        await predictor.ModelInfer(request(request_id="marked"), metadata=mark)
    await infer(stack.gateway, request(request_id="after-the-mark"))
    await records(stack.gateway, request_id="after-the-mark")
    assert [record for record in await query(stack.gateway, request_id="marked") if record.inputs] == []


async def test_an_unloaded_model_is_not_found_until_it_is_loaded_again(stack):
    async with channel(stack.gateway) as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="quiet"))
        assert await code_of(stub.ModelInfer(request("quiet"))) is grpc.StatusCode.NOT_FOUND
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="quiet"))
        assert numbers_of(await stub.ModelInfer(request("quiet"))) == [[1, 2, 3]]


async def test_without_a_predictor_the_call_waits_for_one(stack):
    await stack.kill("predictor-0")
    assert numbers_of(await infer(stack.gateway, request(request_id="waited"))) == [[1, 2, 3]]
    assert "OK" in {record.status for record in await records(stack.gateway, request_id="waited")}
