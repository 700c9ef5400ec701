"""Text streams from the bundled models through Envoy, equal on every way in."""

import json

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.oip.tensors import Tensor, decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, each, generate, ids_request, infer, rest, text_of, text_request

PROMPT = "Once upon a time"
INNER = "predictor"


async def test_a_story_streams_word_by_word(stack):
    responses = []
    async with channel(stack.gateway) as open_channel:
        stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
        request = headrace_pb2.GenerateRequest(
            model="storyteller", prompt=PROMPT, request_id="story-1", temperature=0, pace=100
        )
        call = stub.Generate(request)
        async for response in call:
            responses.append(response)
        trailing = dict(await call.trailing_metadata())
    assert len(responses) >= 20
    assert all(not response.HasField("finish_reason") for response in responses[:-1])
    assert responses[-1].finish_reason == "stop"
    usage = responses[-1].usage
    assert usage.completion_tokens == sum(len(response.token_ids) for response in responses)
    assert trailing["x-request-id"] == "story-1"
    assert 0 < float(trailing["x-ttft-ms"]) < 10_000
    assert text_of(responses).strip().endswith((".", "!", '"'))


async def test_every_way_in_gives_the_same_text(stack):
    settings = {"max_tokens": 24, "temperature": 0}
    whole = text_of(await generate(stack.gateway, model="storyteller", prompt=PROMPT, **settings))
    assert len(whole) > 40

    outputs = await infer(stack.gateway, text_request("storyteller", PROMPT, **settings))
    assert outputs["text_output"].array[0].decode() == whole

    async with channel(stack.gateway) as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        request = text_request("storyteller", PROMPT, pace=50, **settings)
        streamed = [
            decode_outputs(response.infer_response)["text_output"].array[0].decode()
            async for response in stub.ModelStreamInfer(each(request))
        ]
    assert len(streamed) > 5
    assert "".join(streamed) == whole

    body = {"model": "storyteller", "prompt": PROMPT, **settings}
    for path in ("/v1/completions", "/openai/v1/completions"):
        answer = await rest(stack.gateway, "POST", path, body)
        assert answer.json["choices"][0]["text"] == whole
        assert answer.json["usage"]["completion_tokens"] == 24
    answer = await rest(stack.gateway, "POST", "/headrace/v1/generate", body)
    assert "".join(json.loads(line).get("text", "") for line in answer.body.splitlines()) == whole
    answer = await rest(stack.gateway, "POST", "/v2/models/storyteller/generate", {"text_input": PROMPT, **settings})
    assert answer.json["text_output"] == whole


async def test_tokens_are_biased_allowed_and_banned_on_every_protocol(stack):
    settings = {"model": "storyteller", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    ids = [token_id for response in await generate(stack.gateway, **settings) for token_id in response.token_ids]
    whole = text_of(await generate(stack.gateway, **settings))
    word = whole.split()[1]

    biased = await generate(stack.gateway, **settings, logit_bias={ids[-1]: 100})
    assert [token_id for response in biased for token_id in response.token_ids] == [ids[-1]] * 6
    only = await generate(stack.gateway, **settings, allowed_token_ids=ids[:2])
    assert {token_id for response in only for token_id in response.token_ids} <= set(ids[:2])
    banned = await generate(stack.gateway, **settings, bad_token_ids=[headrace_pb2.TokenIds(ids=ids[:3])])
    assert [token_id for response in banned for token_id in response.token_ids][:2] == ids[:2]
    assert [token_id for response in banned for token_id in response.token_ids][2] != ids[2]
    without = text_of(await generate(stack.gateway, **settings, bad_words=[word]))
    assert word not in without.split()

    body = settings | {"bad_words": [word], "logit_bias": {}}
    assert (await rest(stack.gateway, "POST", "/v1/completions", body)).json["choices"][0]["text"] == without
    body = settings | {"logit_bias": {str(ids[-1]): 100}}
    assert (await rest(stack.gateway, "POST", "/v1/completions", body)).json["choices"][0]["text"] == text_of(biased)
    body = {"text_input": PROMPT, "temperature": 0, "max_tokens": 6, "logit_bias": {str(ids[-1]): 100}}
    answer = await rest(stack.gateway, "POST", "/v2/models/storyteller/generate", body)
    assert answer.json["text_output"] == text_of(biased)
    request = text_request("storyteller", PROMPT, temperature=0, max_tokens=6)
    request.parameters["bad_token_ids"].string_param = f"[{ids[:3]}]"
    assert (await infer(stack.gateway, request))["text_output"].array[0].decode() == text_of(banned)
    body = {"prompt": PROMPT, "model": "storyteller", "allowed_token_ids": [ids[0]], "bad_token_ids": [[ids[0]]]}
    answer = await rest(stack.gateway, "POST", "/v1/completions", body)
    assert answer.status == 400
    assert "leave no allowed token" in answer.json["error"]["message"]


async def test_top_logprobs_name_the_likeliest_tokens(stack):
    settings = {"max_tokens": 12, "temperature": 0}
    responses = await generate(
        stack.gateway, model="storyteller", prompt=PROMPT, logprobs=True, top_logprobs=3, **settings
    )
    for response in responses:
        assert len(response.top_logprobs) == len(response.token_ids) == len(response.logprobs)
        for token_id, logprob, top in zip(response.token_ids, response.logprobs, response.top_logprobs, strict=True):
            assert (top.token_ids[0], top.logprobs[0]) == (token_id, logprob)
            assert len(set(top.token_ids)) == 3
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)

    ids = Tensor("input_ids", "INT32", np.array([3, 4, 5], dtype=np.int32))
    outputs = await infer(stack.gateway, ids_request("storyteller", ids, logprobs=1, top_logprobs=3, **settings), INNER)
    assert outputs["top_logprob_ids"].datatype == "INT32"
    assert outputs["top_logprob_ids"].array[:, 0].tolist() == outputs["output_ids"].array.tolist()
    assert outputs["top_logprobs"].array.shape == (12, 3)
    assert np.array_equal(outputs["top_logprobs"].array[:, 0], outputs["logprobs"].array)


async def test_health_agrees_on_every_protocol(stack):
    assert (await rest(stack.gateway, "GET", "/v2/health/live")).json == {"live": True}
    ready = await rest(stack.gateway, "GET", "/v2/health/ready")
    assert (ready.status, ready.json) == (200, {"ready": True})
    names = ("", "ready", "inference.GRPCInferenceService", "headrace.v1.TextGeneration", "headrace.v1.PayloadLog")
    async with channel(stack.gateway) as open_channel:
        for name in names:
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
