"""OpenAI's API through the gateway, with OpenAI's own client and with plain HTTP."""

import asyncio
import json
import uuid

import pytest
import pytest_asyncio

from headrace_transformer.frontends.openai.generation_requests import choice_seed
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.support.tool_models import save_tool_model
from tests.system.calls import post, records
from tests.system.own_clients import client_passes

STORY = {"model": "storyteller", "prompt": "Once upon a time", "ignore_eos": True}
WORDS = ("the", "fox", "sat", "on", "a", "mat", "bird")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """An embedding model, its tokenizer, and the folder of both."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    return save_random_encoder("bert", folder), save_words_tokenizer(folder, *WORDS), folder


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory, embedder):
    models = {
        "storyteller": "models/storyteller",
        "caller": save_tool_model(tmp_path_factory.mktemp("models") / "caller", "hermes"),
        "normalizer": "models/normalizer",
        "embedder": embedder[2],
        "identity": "models/identity",
    }
    async with stacks.use(models=",".join(f"{name}={where}" for name, where in models.items())) as started:
        yield started


async def test_openais_own_client_works_unchanged(stack):
    await client_passes("openai_client", stack.gateway)


def streamed_answer(answer):
    """Text, token ids and the prompt's ids of an answer in events, from whichever of its two places."""
    events = [json.loads(event) for event in answer.events[:-1]]
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)
    prompts = [place["prompt_token_ids"] for place in (*events, *choices) if "prompt_token_ids" in place]
    return text, [token_id for choice in choices for token_id in choice["token_ids"]], prompts


async def test_an_answer_includes_its_stop_string_and_its_token_ids_on_request(stack):
    body = {**STORY, "temperature": 0, "max_tokens": 30}
    plain = (await post(stack, "/v1/completions", body)).json["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()
    stop = plain["text"][30:36]
    body |= {"stop": [stop], "include_stop_str_in_output": True, "return_token_ids": True}
    name = f"stop-{uuid.uuid4().hex}"
    whole = (await post(stack, "/v1/completions", body, x_request_id=name)).json
    (choice,) = whole["choices"]
    assert choice["text"] == plain["text"][: plain["text"].index(stop) + len(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    prompt_ids = (await post(stack, "/tokenize", {"model": "storyteller", "prompt": STORY["prompt"]})).json["tokens"]
    assert choice["prompt_token_ids"] == prompt_ids
    (record,) = await records(stack.gateway, request_id=name)
    assert record.text == choice["text"]
    streamed = streamed_answer(await post(stack, "/v1/completions", {**body, "stream": True}))
    assert streamed == (choice["text"], choice["token_ids"], [prompt_ids])

    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    chat = (await post(stack, "/v1/chat/completions", body)).json
    (choice,) = chat["choices"]
    assert len(choice["token_ids"]) == chat["usage"]["completion_tokens"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    streamed = streamed_answer(await post(stack, "/v1/chat/completions", {**body, "stream": True}))
    assert streamed == (choice["message"]["content"], choice["token_ids"], [chat["prompt_token_ids"]])


async def test_each_choice_has_a_record_under_the_requests_id(stack):
    body = {**STORY, "max_tokens": 10, "n": 3, "seed": 1}
    answer = await post(stack, "/v1/completions", body, x_request_id="three-choices")
    kept = await records(stack.gateway, 3, request_id="three-choices")
    assert len(kept) == 3
    assert {record.text for record in kept} == {choice["text"] for choice in answer.json["choices"]}
    assert {record.status for record in kept} == {"OK"}
    assert {json.loads(record.parameters)["seed"] for record in kept} == {choice_seed(1, i) for i in range(3)}


async def test_the_record_of_calls_has_the_models_own_text_and_the_tools(stack):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "There.", "tool_call_id": "1"},
    ]
    chosen = {"type": "function", "function": {"name": "g"}}
    body = {
        "model": "caller",
        "messages": messages,
        "tools": tools,
        "tool_choice": chosen,
        "parallel_tool_calls": False,
    }
    answer = await post(stack, "/v1/chat/completions", body, x_request_id="calls")
    (made,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "g", "arguments": '{"city": "Rome"}'}
    (record,) = await records(stack.gateway, request_id="calls")
    assert record.text == '<tool_call>\n{"name": "g", "arguments": {"city": "Rome"}}\n</tool_call>'
    parameters, (_, called, result) = json.loads(record.parameters), json.loads(record.prompt)
    assert (parameters["tools"], parameters["tool_choice"], parameters["parallel_tool_calls"]) == (
        tools[1:],
        "required",
        False,
    )
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "content": "There.", "tool_call_id": "1"}
    assert "grammar" in record.sampling


async def test_a_model_with_tools_and_a_form_calls_or_answers_in_the_form(stack):
    few = {"type": "array", "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}, "days": {"items": {"type": "boolean"}, **few, "uniqueItems": True}},
        "required": ["city"],
    }
    form = {"properties": {"warm": {"type": "boolean"}}, "required": ["warm"], "additionalProperties": False}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object", **form}, "strict": True}}
    ]
    formats += [{"type": "json_object", name: form} for name in ("schema", "value")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {
        "model": "caller",
        "messages": [{"role": "user", "content": "Is it warm?"}],
        "tools": tools,
        "temperature": 2,
    }

    async def ask(number, **fields):
        fields |= {"response_format": formats[number % 3], "seed": number, "max_tokens": 400}
        answer = await post(stack, "/v1/chat/completions", {**body, **fields})
        return answer.headers.get("x-ignored-fields"), answer.json["choices"][0]

    begin = (await post(stack, "/tokenize", {"model": "caller", "prompt": "<tool_call>"})).json["tokens"][1]
    asked = [ask(number, logit_bias=bias) for bias in ({}, {begin: 100}) for number in range(6)]
    reasons = set()
    for ignored, choice in await asyncio.gather(*asked):
        assert ignored == "tools.f.uniqueItems"
        message, reason = choice["message"], choice["finish_reason"]
        reasons.add(reason)
        assert (message["content"] is None) == ("tool_calls" in message)
        if reason == "tool_calls":
            assert {json.loads(call["function"]["arguments"])["city"] for call in message["tool_calls"]} == {"Rome"}
        elif reason == "stop":
            assert json.loads(message["content"]).keys() == {"warm"}
    assert reasons >= {"tool_calls", "stop"}
    _, choice = await ask(0, tool_choice="required", parallel_tool_calls=False)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    _, choice = await ask(0, tool_choice="none")
    assert json.loads(choice["message"]["content"]).keys() == {"warm"}
