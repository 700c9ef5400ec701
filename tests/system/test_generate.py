"""Text streams from the bundled models through Envoy, the same by every way in."""

import asyncio
import json

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.protos import millrace_pb2, millrace_pb2_grpc
from millrace.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from millrace.tensors import decode_outputs
from tests.system.calls import channel, each, generate, infer, rest, text_of, text_request

PROMPT = "Once upon a time"


async def test_a_story_comes_word_by_word(stack):
    responses = []
    async with channel(stack.gateway) as open_channel:
        stub = millrace_pb2_grpc.TextGenerationStub(open_channel)
        call = stub.Generate(millrace_pb2.GenerateRequest(model="storyteller", prompt=PROMPT, request_id="story-1"))
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
        request = text_request("storyteller", PROMPT, **settings)
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


async def test_the_same_seed_tells_the_same_story(stack):
    async def tell(seed):
        return text_of(await generate(stack.gateway, model="storyteller", prompt=PROMPT, seed=seed, max_tokens=40))

    first, again, other = await asyncio.gather(tell(5), tell(5), tell(6))
    assert first == again != other


async def test_a_stop_string_ends_the_text_before_it(stack):
    settings = {"model": "storyteller", "prompt": PROMPT, "temperature": 0}
    whole = text_of(await generate(stack.gateway, **settings))
    stop = whole[30:36]
    responses = await generate(stack.gateway, **settings, stop=[stop])
    assert text_of(responses) == whole[: whole.index(stop)]
    assert responses[-1].finish_reason == "stop"


async def test_logprobs_and_larger_chunks_come_as_asked(stack):
    responses = await generate(
        stack.gateway, model="storyteller", prompt=PROMPT, max_tokens=20, ignore_eos=True, logprobs=True, chunk_tokens=7
    )
    assert [len(response.token_ids) >= 7 for response in responses[:-1]] == [True] * (len(responses) - 1)
    for response in responses:
        assert len(response.logprobs) == len(response.token_ids)
        assert all(logprob <= 0 for logprob in response.logprobs)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("date: 3 Mar 2021", "2021-03-03"),
        ("number to words: 42", "forty two"),
        ("words to number: seven hundred twelve", "712"),
    ],
)
async def test_the_normalizer_answers_right(stack, prompt, answer):
    assert text_of(await generate(stack.gateway, model="normalizer", prompt=prompt)).replace(
        "-", " "
    ) == answer.replace("-", " ")


async def test_chat_streams_server_sent_events(stack):
    body = {
        "model": "storyteller",
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "stream": True,
        "max_tokens": 120,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    answer = await rest(stack.gateway, "POST", "/v1/chat/completions", body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-request-id"]
    assert answer.events[-1] == "[DONE]"
    assert len(answer.pieces) >= 20
    usage = json.loads(answer.events[-2])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 120


async def test_health_is_told_alike_by_every_protocol(stack):
    assert (await rest(stack.gateway, "GET", "/v2/health/live")).json == {"live": True}
    ready = await rest(stack.gateway, "GET", "/v2/health/ready")
    assert (ready.status, ready.json) == (200, {"ready": True})
    names = ("", "ready", "inference.GRPCInferenceService", "millrace.v1.TextGeneration", "millrace.v1.PayloadLog")
    async with channel(stack.gateway) as open_channel:
        for name in names:
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
