"""Impossible requests are refused at once, with their own status and hop; the next call works.

test_error_table.py tests all errors, and that they mean the same on every way in.
"""

import asyncio

import grpc
import numpy as np
import pytest

from headrace.oip.tensors import Tensor, add_input, bytes_tensor
from tests.system.calls import channel, generate, ids_request, infer, rest, text_of, text_request

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
IDS = np.array([5, 6, 7], dtype=np.int64)


@pytest.fixture(autouse=True)
async def next_call_works(stack):
    yield
    assert text_of(await generate(stack.gateway, model="storyteller", prompt="Once upon a time", max_tokens=3))


GENERATE = {
    "empty prompt": ({"prompt": ""}, INVALID, "the prompt is empty"),
    "neither prompt nor messages": ({"prompt": None}, INVALID, "give one of a prompt, its ids and messages"),
    "prompt and its ids": ({"prompt_ids": [5]}, INVALID, "give one of a prompt, its ids and messages"),
    "ids too many": ({"prompt": None, "prompt_ids": [5] * 1500}, INVALID, "the context is 1024"),
    "prompt too long": ({"prompt": "once " * 1500}, INVALID, "the context is 1024"),
    "prompt of megabytes": ({"prompt": "x" * 3_000_000}, INVALID, "the prompt has 3000000 bytes"),
    "temperature": ({"temperature": -1}, INVALID, "temperature=-1"),
    "top_p": ({"top_p": 1.5}, INVALID, "top_p=1.5"),
    "max_tokens": ({"max_tokens": 5000}, INVALID, "max_tokens=5000"),
    "stop": ({"stop": [""]}, INVALID, "stop string"),
}


@pytest.mark.parametrize("case", GENERATE)
async def test_generate_refuses_wrong_requests(stack, case):
    change, status, text = GENERATE[case]
    fields = {"model": "storyteller", "prompt": "Once", **change}
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(stack.gateway, **{name: value for name, value in fields.items() if value is not None})
    assert raised.value.code() is status
    assert text in raised.value.details()
    assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "transformer"


async def test_generate_refuses_an_unknown_token_id(stack):
    with pytest.raises(grpc.aio.AioRpcError, match="token id 1000005") as raised:
        await generate(stack.gateway, model="storyteller", prompt_ids=[5, 1_000_005])
    assert raised.value.code() is INVALID


PREDICTOR = {
    "dtype": ("storyteller", Tensor("input_ids", "FP32", IDS.astype(np.float32)), {}, INVALID, "must be INT64"),
    "shape": ("storyteller", Tensor("input_ids", "INT64", IDS.reshape(3, 1)), {}, INVALID, "shape [N] or [1, N]"),
    "token id": ("storyteller", Tensor("input_ids", "INT64", IDS + 10**6), {}, INVALID, "token id 1000005"),
    "empty": ("storyteller", Tensor("input_ids", "INT64", IDS[:0]), {}, INVALID, "the prompt is empty"),
    "too long": ("storyteller", Tensor("input_ids", "INT64", np.repeat(IDS, 400)), {}, INVALID, "1200 tokens"),
    "unknown input": ("storyteller", Tensor("inputs", "INT64", IDS), {}, INVALID, "unknown input 'inputs'"),
    "parameter": ("storyteller", Tensor("input_ids", "INT64", IDS), {"max_tokens": 0}, INVALID, "max_tokens=0"),
}


@pytest.mark.parametrize("case", PREDICTOR)
async def test_the_predictor_refuses_wrong_requests(stack, case):
    model, tensor, parameters, status, text = PREDICTOR[case]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await infer(stack.gateway, ids_request(model, tensor, **parameters), authority="predictor")
    assert raised.value.code() is status
    assert text in raised.value.details()
    assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "predictor"


async def test_a_tensor_whose_size_is_wrong_is_refused(stack):
    request = ids_request("storyteller", Tensor("input_ids", "INT64", IDS))
    request.raw_input_contents[0] = b"123"
    with pytest.raises(grpc.aio.AioRpcError, match="24 bytes, got 3") as raised:
        await infer(stack.gateway, request, authority="predictor")
    assert raised.value.code() is INVALID


async def test_malformed_messages_are_refused(stack):
    async with channel(stack.gateway) as open_channel:
        for method in ("/inference.GRPCInferenceService/ModelInfer", "/headrace.v1.TextGeneration/Generate"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await open_channel.unary_unary(method)(b"\xff\xff\xff", timeout=10)
            assert raised.value.code() is INVALID
            assert raised.value.details() == "the request is not the message that the method takes"
            assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "transformer"


async def test_a_very_long_refusal_affects_no_other_call(stack):
    long = "9" * 100_000

    def with_parameter(name, value):
        request = text_request("storyteller", "Once")
        request.parameters[name].string_param = value
        return request

    bad = [with_parameter("temperature", long), with_parameter(long, "1"), text_request(long, "Once")]
    settings = {"model": "storyteller", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "seed": 3}
    alone = text_of(await generate(stack.gateway, **settings))
    neighbours = [asyncio.create_task(generate(stack.gateway, **settings)) for _ in range(3)]
    for authority in (None, "predictor"):
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await infer(stack.gateway, request, authority)
            assert raised.value.code() in (INVALID, NOT_FOUND)
    assert [text_of(responses) for responses in await asyncio.gather(*neighbours)] == [alone] * 3


async def test_deeply_nested_sampling_parameters_are_refused(stack):
    request = text_request("storyteller", "Once")
    add_input(request, bytes_tensor("sampling_parameters", [b"[" * 100_000]))
    with pytest.raises(grpc.aio.AioRpcError, match="sampling_parameters is not JSON"):
        await infer(stack.gateway, request)


COMPLETION = {"model": "storyteller", "prompt": "Once"}
CHAT = {"model": "storyteller", "messages": [{"role": "user", "content": "Hello"}]}
REST = {
    "empty prompt": ("/v1/completions", {**COMPLETION, "prompt": ""}, 400, "the prompt is empty"),
    "prompt missing": ("/v1/completions", {"model": "storyteller"}, 400, "prompt: Field required"),
    "prompt too long": ("/v1/completions", {**COMPLETION, "prompt": "once " * 1500}, 400, "the context is 1024"),
    "temperature": ("/v1/completions", {**COMPLETION, "temperature": "hot"}, 400, "temperature='hot'"),
    "not supported": ("/v1/completions", {**COMPLETION, "best_of": 2}, 400, "best_of=2 is not supported"),
    "no messages": ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "messages"),
    "unknown role": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "x", "content": "y"}]},
        400,
        "chat template",
    ),
    "not JSON": ("/v1/completions", b"{", 400, "JSON"),
    "too many messages": ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * 5000}, 400, "at most 4096"),
    "body of megabytes": ("/v1/completions", {**COMPLETION, "prompt": "x" * 9_000_000}, 400, "more than any prompt"),
    "audio": ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, 400, "modalities=['audio'] is not supported"),
    "truth for a number": ("/v1/completions", {**COMPLETION, "n": True}, 400, "n: Input should be a valid integer"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REST)
async def test_rest_refuses_wrong_requests(stack, case, stream):
    path, body, status, text = REST[case]
    answer = await rest(stack.gateway, "POST", path, body | {"stream": stream} if isinstance(body, dict) else body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-failed-hop"] == "transformer"
    assert text in answer.json["error"]["message"]
    assert not any(name.startswith("grpc-") or name == "x-http-status" for name in answer.headers)
