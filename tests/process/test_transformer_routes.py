"""Before a real connection to a predictor: fallback to another model, and the lowest weight for batches."""

import grpc
import numpy as np
import orjson
import pytest

from headrace.clients import CLIENT
from headrace.errors import HopBrokenError, NotFoundError, NotReadyError, OverloadedError
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace.rpc.server.call_context import BACKGROUND
from headrace_protos import inference_pb2 as pb
from headrace_transformer.generation.token_quota import Reservation
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, alone, serving, whole
from tests.support.status import code_of, refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request

SECOND = "second"
MODELS = f"{MODEL}=models/storyteller,{SECOND}=models/storyteller"
FALLS_BACK = "chat: {model: teller, fallback: [second]}"


def fails(model, error, after=0):
    """One model's requests end with an error after so many tokens; those of others are answered."""

    async def action(predictor, call):
        if call.request.model == model:
            for _ in range(after):
                yield 1
            raise error
        async for count in whole(predictor, call):
            yield count

    return action


def routed(tmp_path, text):
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    return path


async def tokens_of(stub, request):
    for name in ("text_output", "num_output_tokens"):
        request.outputs.add(name=name)
    responses = [response.infer_response async for response in stub.ModelStreamInfer(each(request))]
    return sum(int(decode_outputs(response)["num_output_tokens"].array[0]) for response in responses)


@pytest.mark.parametrize(
    "error",
    [NotFoundError("no such model"), OverloadedError("the queue is full")],
    ids=lambda error: type(error).__name__,
)
async def test_a_request_falls_back_to_another_model_if_its_own_fails(tmp_path, error, monkeypatch):
    used = []
    monkeypatch.setattr(Reservation, "__exit__", lambda reservation, *_: used.append(reservation.used))
    predictor = ScriptedPredictor(*[fails(MODEL, error)] * 50, models=(MODEL, SECOND))
    routes = routed(tmp_path, FALLS_BACK)
    async with serving(predictor) as address, transformer(address, MODELS, routes=routes) as (stub, _):
        assert await tokens_of(stub, text_request("chat", "Tell me", max_tokens=5)) == 5
    assert predictor.calls[-1].request.model == SECOND
    assert used == [0, len(predictor.calls[-1].request.prompt_ids) + 5]  # The prompt is charged once.


async def test_a_request_that_kills_its_predictor_does_not_fall_back(tmp_path):
    error = HopBrokenError("the engine died")
    predictor = ScriptedPredictor(*[alone(fails(MODEL, error))] * 50, models=(MODEL, SECOND))
    routes = routed(tmp_path, FALLS_BACK)
    async with serving(predictor) as address, transformer(address, MODELS, routes=routes) as (stub, _):
        assert await code_of(stub.ModelInfer(text_request("chat", "Tell me", max_tokens=5))) is grpc.StatusCode.INTERNAL
    assert {call.request.model for call in predictor.calls} == {MODEL}


async def test_if_all_models_fail_the_last_error_is_the_answer(tmp_path):
    async def all_fail(predictor, call):
        raise NotReadyError(f"{call.request.model} loads")
        yield

    predictor = ScriptedPredictor(*[all_fail] * 50, models=(MODEL, SECOND))
    routes = routed(tmp_path, FALLS_BACK)
    async with serving(predictor) as address, transformer(address, MODELS, routes=routes, wait_s=0.2) as (stub, _):
        raised = await refusal(stub.ModelInfer(text_request("chat", "Tell me", max_tokens=5)))
    assert (raised.code(), raised.details()) == (grpc.StatusCode.UNAVAILABLE, "second loads")
    assert [call.request.model for call in predictor.calls][-1] == SECOND


def tensors(model):
    request = pb.ModelInferRequest(model_name=model, id="r")
    add_input(request, Tensor("input_ids", "INT64", np.arange(5)))
    return request


async def test_requests_for_tensors_fall_back_too(tmp_path):
    class Loads(ScriptedPredictor):
        async def ModelInfer(self, request, context):  # noqa: N802
            if request.model_name == MODEL:
                raise NotReadyError("it loads")
            return await super().ModelInfer(request, context)

    predictor = Loads(models=(MODEL, SECOND))
    routes = routed(tmp_path, FALLS_BACK)
    # Without their tokenizers both models take tensors.
    async with serving(predictor) as address, transformer(address, routes=routes) as (stub, _):
        answer = await stub.ModelInfer(tensors("chat"))
    assert answer.model_name == "chat"
    assert predictor.calls[-1].request.model_name == SECOND


@pytest.mark.parametrize("client", ["", "alice"])
async def test_the_engine_knows_what_belongs_to_a_batch(client):
    predictor = ScriptedPredictor()
    named = [(CLIENT, client)] if client else []
    body = orjson.dumps({"model": MODEL, "prompt": "Tell me", "max_tokens": 3})
    async with serving(predictor) as address, transformer(address, f"{MODEL}=models/storyteller") as (stub, _):
        for headers in (named, [*named, (BACKGROUND, "batch_1")]):
            assert (await stub.openai("Completions", body, headers)).status == 200
    interactive, background = [call.request for call in predictor.calls]
    assert (interactive.client, interactive.weight) == (client, 1.0)
    # An account of its own for each client, for an account is also whose cached prefixes are shared.
    assert (background.client, background.weight) == (f"~batches {client}", 0.001)
