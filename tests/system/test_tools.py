"""Requests as guidellm, genai-perf and lm-eval send them; `make test-tools` runs the tools themselves."""

import json

import pytest

from headrace import __version__
from tests.system.calls import post, records, rest

MODEL = {"model": "storyteller"}
PARTS = "tokens", "token_logprobs", "top_logprobs"
PLACES = "tokens", "text_offset"
PROMPT_IDS = [924, 410, 263, 453, 402, 263, 933, 19]  # "Tell me a story about a fox."


async def get(stack, path):
    return await rest(stack.gateway, "GET", path)


async def test_guidellm_checks_health_and_reads_usage_in_every_event(stack):
    health = await get(stack, "/health")
    assert (health.status, health.body) == (200, b"")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**MODEL, "stream": True, "stream_options": options, "ignore_eos": True, "prompt": "1 0 m0 Finish"}
    *chunks, last, end = (await post(stack, "/v1/completions", {**body, "max_tokens": 16})).events
    assert end == "[DONE]"
    usages = [json.loads(chunk)["usage"] for chunk in chunks]
    total = json.loads(last)["usage"]
    made = [usage["completion_tokens"] for usage in usages]
    assert made == sorted(made)
    assert made[-1] == total["completion_tokens"] == 16
    assert {usage["prompt_tokens"] for usage in usages} == {total["prompt_tokens"]}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    content = [{"type": "text", "text": "1 0 m0 Finish"}]
    del body["prompt"]
    body |= {"max_completion_tokens": 16, "messages": [{"role": "user", "content": content}]}
    *_, last, _ = (await post(stack, "/v1/chat/completions", body)).events
    assert json.loads(last)["usage"]["completion_tokens"] == 16


def lm_eval_parses(answer, lengths):
    """The log likelihood of the text after a context, and whether it is greedy, read as lm-eval does."""
    results = []
    for choice, length in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        results.append((sum(values), all(a == max(top.values()) for a, top in zip(values, tops, strict=True))))
    return results


async def test_lm_eval_scores_the_likelihood_of_texts(stack):
    body = {**MODEL, "max_tokens": 1, "temperature": 0, "seed": 1234}
    greedy = await post(stack, "/v1/completions", {**body, "prompt": PROMPT_IDS, "max_tokens": 6, "logprobs": 1})
    made = greedy.json["choices"][0]["logprobs"]
    ids = (
        await post(stack, "/tokenize", {**MODEL, "prompt": "".join(made["tokens"]), "add_special_tokens": False})
    ).json
    assert ids["count"] == 6
    unlikely = [*PROMPT_IDS, *reversed(ids["tokens"])]
    prompts = [[*PROMPT_IDS, *ids["tokens"]], unlikely]
    answer = (await post(stack, "/v1/completions", {**body, "prompt": prompts, "logprobs": 1, "echo": True})).json
    (likely, is_greedy), (less, is_not) = lm_eval_parses(answer, [8, 8])
    assert likely == pytest.approx(sum(made["token_logprobs"]), abs=1e-4)
    assert less < likely
    assert (is_greedy, is_not) == (True, False)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("prompt", ["Tell me a story about a fox.", PROMPT_IDS])
async def test_an_echo_alone_has_the_prompt_s_log_probabilities(stack, prompt):
    text = "Tell me a story about a fox."
    body = {**MODEL, "prompt": prompt, "max_tokens": 0, "temperature": 0, "logprobs": 1, "echo": True}
    answer = (await post(stack, "/v1/completions", body)).json
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]
    assert "".join(logprobs["tokens"]).removeprefix("<s>") == text
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, value, top in list(zip(*(logprobs[name] for name in PARTS), strict=True))[1:]:
        assert top[token] == value <= max(top.values())
    places = list(zip(*(logprobs[name] for name in PLACES), strict=True))[1:]
    assert all(text.startswith(token, at) for token, at in places)
    streamed = json.loads((await post(stack, "/v1/completions", {**body, "stream": True})).events[0])["choices"][0]
    assert streamed == choice


async def test_prompt_logprobs_have_vllms_shape(stack):
    body = {**MODEL, "prompt": PROMPT_IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    echo = (await post(stack, "/v1/completions", {**body, "logprobs": 2, "echo": True})).json["choices"][0]
    (choice,) = (await post(stack, "/v1/completions", {**body, "logprobs": 1})).json["choices"]
    assert len(choice["logprobs"]["tokens"]) == 1
    first, *scores = choice["prompt_logprobs"]
    assert first is None
    assert echo["prompt_logprobs"] == choice["prompt_logprobs"]
    values = echo["logprobs"]["token_logprobs"][1 : len(PROMPT_IDS)]
    assert [place[str(own)]["logprob"] for place, own in zip(scores, PROMPT_IDS[1:], strict=True)] == values
    for place in scores:
        ranked = sorted((one for one in place.values() if one["rank"]), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]
        assert all(isinstance(one["decoded_token"], str) for one in ranked)
    chat = {**MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = (await post(stack, "/v1/chat/completions", chat)).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_lm_eval_uses_the_server_s_tokenizer(stack):
    info = (await get(stack, "/tokenizer_info?model=storyteller")).json
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<s>", "</s>", 1024)
    assert "add_generation_prompt" in info["chat_template"]
    text = "Tell me a story about a fox."
    body = {**MODEL, "prompt": text, "add_special_tokens": False}
    answer = (await post(stack, "/tokenize", body)).json
    assert answer == {"count": 8, "max_model_len": 1024, "tokens": PROMPT_IDS, "token_strs": None}
    assert (await post(stack, "/detokenize", {**MODEL, "tokens": PROMPT_IDS})).json == {"prompt": text}
    assert (await post(stack, "/detokenize", {**MODEL, "tokens": []})).json == {"prompt": ""}


async def test_a_conversation_is_tokenised_as_a_chat_completion_does_it(stack):
    conversation = {**MODEL, "messages": [{"role": "user", "content": "hi"}]}
    ids = (await post(stack, "/tokenize", {**conversation, "return_token_strs": True})).json
    assert ids["token_strs"][0] == "<s>"
    usage = (await post(stack, "/v1/chat/completions", {**conversation, "max_tokens": 1})).json["usage"]
    assert usage["prompt_tokens"] == ids["count"]
    without = {**conversation, "add_generation_prompt": False}
    assert (await post(stack, "/tokenize", without)).json["count"] < ids["count"]


REFUSED = {
    "no output, no echo": ("/v1/completions", {**MODEL, "prompt": "a", "max_tokens": 0}, "max_tokens=0"),
    "an encoder's prompt": (
        "/v1/completions",
        {"model": "normalizer", "prompt": "a", "echo": True, "logprobs": 1},
        "model 'normalizer' has no log probabilities of prompts",
    ),
    "too many": (
        "/v1/completions",
        {**MODEL, "prompt": ["once " * 200] * 64, "echo": True, "logprobs": 20},
        "and 64 choices, log probabilities are given for at most 48",
    ),
    "no prompt": ("/tokenize", MODEL, "give either a prompt or messages"),
    "huge": ("/tokenize", {**MODEL, "prompt": "a" * 1_100_000}, "longer than 1048576 bytes"),
    "text for ids": ("/detokenize", {**MODEL, "tokens": ["a"]}, "token ids"),
    "no model": ("/tokenize", {"prompt": "a"}, "name a model; there are storyteller, normalizer"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refusals_have_openais_shape(stack, case):
    path, body, text = REFUSED[case]
    answer = await rest(stack.gateway, "POST", path, body)
    assert answer.status == 400
    assert text in answer.json["error"]["message"]


async def test_a_model_s_card_and_the_version_are_served(stack):
    listed = (await get(stack, "/v1/models")).json["data"]
    assert {card["id"]: card["max_model_len"] for card in listed} == {"storyteller": 1024, "normalizer": 512}
    assert (await get(stack, "/version")).json == {"version": __version__}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_fields_without_effect_are_named_in_a_header_and_the_record(stack, path):
    prompt = {"prompt": "Once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Once"}]}
    request_id = f"ignored-{path.count('/')}"
    body = {**MODEL, **prompt, "max_tokens": 2, "include_reasoning": True, "stream_interval": 2}
    for stream in (False, True):
        answer = await post(stack, path, {**body, "stream": stream}, x_request_id=request_id)
        assert answer.headers["x-ignored-fields"] == "include_reasoning, stream_interval"
    for record in await records(stack.gateway, 2, request_id=request_id):
        assert json.loads(record.parameters)["ignored_fields"] == ["include_reasoning", "stream_interval"]
    answer = await post(stack, path, {**MODEL, **prompt, "max_tokens": 2, "top_k": 3, "user": None})
    assert "x-ignored-fields" not in answer.headers


async def test_an_answer_has_its_stop_reason(stack):
    body = {**MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    (whole,) = (await post(stack, "/v1/completions", body)).json["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    word = whole["text"].split()[1]
    (ended,) = (await post(stack, "/v1/completions", {**body, "stop": ["no such", word]})).json["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", word)
    ids = (await post(stack, "/tokenize", {**MODEL, "prompt": whole["text"], "add_special_tokens": False})).json[
        "tokens"
    ]
    events = (await post(stack, "/v1/completions", {**body, "stop_token_ids": ids[1:2], "stream": True})).events
    last = json.loads(events[-2])["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", ids[1])
