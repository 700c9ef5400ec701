"""Routes of the whole stack: aliases on every way in, a fallback, and the records of each."""

import json

import grpc
import numpy as np
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, each, records, rest
from tests.system.request_outcome import Request
from tests.system.ways_in import TEXT

MODELS = "storyteller=models/storyteller,acme/second=models/storyteller,acme/lab/identity=models/identity"
ROUTES = {
    "acme/chat": {"model": "storyteller"},
    "lost": {"model": "nothing"},
    "safe": {"model": "nothing", "fallback": ["acme/second"]},
    "same": {"model": "acme/lab/identity"},
}
OPTIONS = {"timeout": 60}


@pytest_asyncio.fixture(scope="module")
async def routed(stacks, tmp_path_factory):
    path = tmp_path_factory.mktemp("routes") / "routes.yaml"
    path.write_text(json.dumps(ROUTES))
    settings = {"transformer": {"TRANSFORMER_MODEL_ROUTES": str(path), "TRANSFORMER_PAYLOAD_LOG": "all"}}
    started = await stacks.start({"models": MODELS, "environment": settings})
    yield started
    await stacks.stop(started)


def completion(model, **fields):
    return {"model": model, "prompt": "Once", "max_tokens": 5, "ignore_eos": True, "seed": 1, **fields}


def numbers(model, request_id):
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    add_input(request, Tensor("x", "INT64", np.array([[1, 2, 3]], np.int64)))
    return request


@pytest.mark.parametrize("way", TEXT)
async def test_an_alias_is_a_model_on_every_way_in(routed, way):
    outcome = await TEXT[way](routed.gateway, Request("acme/chat"))
    assert outcome.status in (200, grpc.StatusCode.OK)


async def test_an_answer_has_the_requested_name_and_the_model_that_gave_it(routed):
    answers = [
        await rest(routed.gateway, "POST", "/v1/completions", completion(name)) for name in ("acme/chat", "storyteller")
    ]
    assert answers[0].json["choices"] == answers[1].json["choices"]
    assert [answer.json["model"] for answer in answers] == ["acme/chat", "storyteller"]
    assert [answer.headers.get("x-headrace-model") for answer in answers] == ["storyteller", None]
    events = await rest(routed.gateway, "POST", "/v1/completions", completion("acme/chat", stream=True, n=2))
    assert events.headers["x-headrace-model"] == "storyteller"
    async with channel(routed.gateway) as open_channel:
        call = GRPCInferenceServiceStub(open_channel).ModelInfer(numbers("same", "asked"), **OPTIONS)
        answer = await call
        assert dict(await call.initial_metadata())["x-headrace-model"] == "acme/lab/identity"
        stream = GRPCInferenceServiceStub(open_channel).ModelStreamInfer(each(numbers("same", "asked")), **OPTIONS)
        streamed = [response.infer_response async for response in stream]
    assert [each.model_name for each in (answer, *streamed)] == ["same"] * (1 + len(streamed))
    assert decode_outputs(answer)["x"].array.tolist() == [[1, 2, 3]]


async def test_the_record_of_a_fallback_has_its_model(routed):
    answer = await rest(routed.gateway, "POST", "/v1/completions", completion("safe"), **{"x-request-id": "fell-back"})
    assert (answer.status, answer.headers["x-headrace-model"]) == (200, "acme/second")
    (record,) = await records(routed.gateway, request_id="fell-back")
    assert (record.model, record.served_model) == ("safe", "acme/second")
    answer = await rest(routed.gateway, "POST", "/v1/completions", completion("lost"))
    assert (answer.status, answer.json["error"]["message"]) == (404, "no model behind 'lost' is loaded")


async def test_routes_are_listed(routed):
    cards = {card["id"]: card for card in (await rest(routed.gateway, "GET", "/v1/models")).json["data"]}
    assert (cards["acme/chat"]["root"], "root" in cards["storyteller"], "lost" in cards) == (
        "storyteller",
        False,
        False,
    )
    async with channel(routed.gateway) as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(), **OPTIONS)
        states = {model.name: model.state for model in index.models}
        assert [states[name] for name in ("acme/chat", "lost", "safe")] == ["READY", "UNAVAILABLE", "READY"]
        for name, inner in (("acme/chat", "storyteller"), ("same", "acme/lab/identity")):
            metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=name), **OPTIONS)
            config = await stub.ModelConfig(pb.ModelConfigRequest(name=name), **OPTIONS)
            assert (metadata.name, config.config.name) == (name, name)
            assert metadata.inputs == (await stub.ModelMetadata(pb.ModelMetadataRequest(name=inner), **OPTIONS)).inputs
            assert (await stub.ModelReady(pb.ModelReadyRequest(name=name), **OPTIONS)).ready
        statistics = await stub.ModelStatistics(pb.ModelStatisticsRequest(name="same"), **OPTIONS)
        assert statistics.model_stats[0].name == "same"
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="lost"), **OPTIONS)).ready
