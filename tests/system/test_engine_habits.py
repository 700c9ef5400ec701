"""Servers of OpenAI's API write the same streams in ways of their own, all of which the transformer reads."""

import json

import pytest
import pytest_asyncio

from tests.support.scripted_engine import BOM, event, scripted_engines
from tests.system.calls import rest
from tests.system.test_engines import CHAT, FOLDER, TOKENS, events_of, fails_once, lists, texts_of
from tests.waiting import until

HABITS = {
    "no space": lambda data: b"data:" + data + b"\n\n",
    "two spaces, and one behind": lambda data: b"data:  " + data + b" \n\n",
    "CRLF": lambda data: b"data: " + data + b"\r\n\r\n",
    "CR": lambda data: b"data: " + data + b"\r\r",
    "comments": lambda data: b": ping\n\n:\ndata: " + data + b"\n: pong\n\n",
    "fields": lambda data: b"event: message\nid: 7\nretry: 10\ndata: " + data + b"\n\n",
    "lines": lambda data: b"data: " + data.replace(b", ", b",\r\ndata:") + b"\r\n\r\n",
    "no empty line more": lambda data: b"\n\ndata: " + data + b"\n\n\n\n",
}


@pytest_asyncio.fixture(scope="module")
async def engines():
    """Two that give token ids, two that say nothing but a name, and two of text-generation-inference."""
    async with scripted_engines(FOLDER, "vllm", "vllm", "", "", "tgi", "tgi") as made:
        yield made


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, engines):
    one, other, plain, further, tgi, another = (engine.address for engine in engines)
    models = f"chat={one}|{other};tokenizer={FOLDER},passed={plain}|{further},tgi={tgi}|{another};tokenizer={FOLDER}"
    async with stacks.use(models=models) as started:
        await until(lambda: lists(started, {"chat", "passed", "tgi"}))
        yield started


@pytest.fixture(autouse=True)
def plain(engines):
    for engine in engines:
        engine.writes, engine.begins, engine.unfinished, engine.refuses = event, b"", None, None
        engine.requests.clear()


async def text_of(stack, model, engines, cut_at=None):
    done = None if cut_at is None else fails_once(engines, cut_at)
    events, comments = events_of(
        await rest(stack.gateway, "POST", "/v1/chat/completions", {**CHAT, "model": model, "n": 2})
    )
    assert bool(done) == bool(comments)
    reasons = [choice["finish_reason"] for one in events for choice in one["choices"] if choice["finish_reason"]]
    assert reasons == ["length", "length"]
    return texts_of(events)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("model", ["chat", "passed"])
async def test_events_are_read_however_they_are_written(stack, engines, model, habit):
    plain = await text_of(stack, model, engines)
    for engine in engines:
        engine.writes, engine.begins = HABITS[habit], BOM
    assert await text_of(stack, model, engines) == plain
    assert await text_of(stack, model, engines, cut_at=TOKENS // 2) == plain


async def test_a_choice_with_an_empty_reason_goes_on(stack, engines):
    plain = await text_of(stack, "passed", engines)
    for engine in engines:
        engine.unfinished = ""
    assert await text_of(stack, "passed", engines, cut_at=TOKENS // 2) == plain


async def test_a_model_of_nothing_but_a_name_is_served(stack):
    answer = await rest(stack.gateway, "POST", "/v1/completions", {"model": "passed", "prompt": "Once"})
    assert (answer.status, json.loads(answer.body)["model"]) == (200, "passed")


async def test_text_generation_inference_is_found_out_and_gets_text(stack, engines):
    """It lists its model as its own owner, takes any name but its own for an adapter's, and no token ids."""
    plain = await text_of(stack, "tgi", engines)
    for engine in engines[4:]:
        engine.unfinished = ""  # In completions.
    assert await text_of(stack, "tgi", engines, cut_at=TOKENS // 2) == plain
    assert {body["model"] for engine in engines[4:] for _, body, _ in engine.requests} == {"tgi"}


async def test_a_generation_that_failed_at_text_generation_inference_is_tried_elsewhere(stack, engines):
    engines[4].refuses = 424, {"error": "Request failed during generation", "error_type": "generation"}
    body = {"model": "tgi", "prompt": "Once", "max_tokens": TOKENS}
    while not engines[4].requests:  # Which engine is first is chosen at random.
        answer = await rest(stack.gateway, "POST", "/v1/completions", body)
        assert (answer.status, answer.json["model"]) == (200, "tgi")
