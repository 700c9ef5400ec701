"""Models at engines: how they are named, who gets a place, and how llama.cpp's events become tokens."""

import asyncio
import json

import pytest
from tokenizers import Tokenizer

from headrace.errors import HeadraceError, HopBrokenError, InvalidRequestError, StartupError
from headrace.models.engine_sources import EngineSource, read_engines
from headrace.models.sources import parse_models, parse_own_models
from headrace.sampling import SamplingParameters
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.engines.events import parsed
from headrace_transformer.predictors.engines.fair_places import FairPlaces
from headrace_transformer.predictors.engines.passed_stream import PassedAnswer, RepetitionError
from headrace_transformer.predictors.engines.token_call import continues, is_exact
from headrace_transformer.predictors.engines.token_formats import LlamaFormat, OpenAIFormat
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.text.token_bytes import TokenBytes
from tests.waiting import until

BOTH = "own=org/name,chat=http://a:8000/v1|https://b/v1/#served;tokenizer=models/x,plain=http://c:1/v1"


def test_models_name_engines_beside_predictors_own():
    assert [source.name for source in parse_own_models(BOTH)] == ["own"]
    assert parse_models(BOTH)[1:] == (
        EngineSource("chat", ("http://a:8000/v1", "https://b/v1"), "served", "models/x"),
        EngineSource("plain", ("http://c:1/v1",)),
    )
    assert parse_models("a=http://c:1/v1;tokenizer=x") == (EngineSource("a", ("http://c:1/v1",), "", "x"),)


@pytest.mark.parametrize(
    "text",
    [
        "a=http://",
        "a=http://user@host/v1",
        "a=http://h:1/v1|http://h:1/v1",
        "a=http://h:1/v1#x;toknizer=y",
        "a=http://h:1/v1,a=org/name",
        "a=http://h:1/v1 #x",
        "a=http://h:1/v1?x=1",
    ],
)
def test_malformed_engines_are_refused(text):
    with pytest.raises(ValueError, match=r"http|twice|each once"):
        parse_models(text)


def test_a_file_names_engines(tmp_path):
    key, path = tmp_path / "key", tmp_path / "engines.yaml"
    key.write_text("secret\n")
    stated = {"addresses": ["http://a:1/v1/"], "model": "m", "key_file": str(key), "kind": "vllm", "max_running": 4}
    path.write_text(json.dumps({"chat": stated}))
    (source,) = read_engines(path)
    assert (source.addresses, source.served, source.key, source.max_running) == (("http://a:1/v1",), "m", "secret", 4)
    for wrong in ({"adresses": []}, {"addresses": []}, {"addresses": ["ftp://x"]}, {**stated, "kind": "x"}):
        path.write_text(json.dumps({"chat": wrong}))
        with pytest.raises(StartupError, match=r"engines\.yaml"):
            read_engines(path)
    path.write_text(json.dumps({"acme/chat": stated, "../chat": stated}))
    assert next(iter(read_engines(path))).name == "acme/chat"
    with pytest.raises(StartupError, match=r"engines\.yaml: '\.\./chat' is not a name"):
        _ = TransformerSettings(engines=path).all_engines


async def test_places_go_to_the_client_with_the_least_of_its_weight():
    places, order = FairPlaces(), []
    places.limit = 1
    first = await places.take("busy", 1)

    async def wait(client, weight):
        place = await places.take(client, weight)
        order.append(client)
        return place

    waiting = [asyncio.create_task(wait("busy", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(wait("new", 2)) for _ in range(2)]
    await asyncio.sleep(0)
    places.limit = 3
    places.serve()
    await until(lambda: len(order) == 2)
    assert order == ["new", "new"]
    waiting[0].cancel()
    first.close()
    first.close()
    await until(lambda: len(order) == 3)
    for task in waiting[1:]:
        if task.done():
            task.result().close()
    await until(lambda: len(order) == 4)
    for task in waiting[1:]:
        (await task).close()
    again = [await places.take("any", 1) for _ in range(3)]
    assert len(again) == 3


async def test_without_an_engine_nobody_waits_for_a_place():
    places = FairPlaces()
    taken = [await places.take(f"client {number}", 1) for number in range(3)]
    for place in taken:
        place.close()
    assert (dict(places._running), places._waiting) == ({}, {})


@pytest.fixture(scope="module")
def vocabulary():
    return TokenBytes(Tokenizer.from_file("models/storyteller/tokenizer.json"))


@pytest.mark.parametrize("text", ["a€b", "😀", "x😀€y"])
def test_ids_that_llama_cpp_leaves_out_are_found(vocabulary, text):
    """Its stream has one event for each token that ends a character, and no other."""
    ids, shown, events = [vocabulary.id_of(bytes([byte])) for byte in text.encode()], b"", []
    for count, token_id in enumerate(ids, 1):
        shown += vocabulary.of(token_id)
        try:
            content = shown.decode()
        except UnicodeDecodeError:
            continue
        events.append({"content": content, "tokens": [token_id], "tokens_predicted": count})
        shown = b""
    reader, chunk = LlamaFormat(vocabulary), TokenChunk()
    reader.body("m", [1], SamplingParameters(max_tokens=99), 0)
    for event in events:
        reader.take(event, chunk)
    assert chunk.token_ids == ids


def test_the_id_that_ends_an_answer_of_llama_cpp_waits_for_the_end(vocabulary):
    reader, chunk = LlamaFormat(vocabulary), TokenChunk()
    reader.body("m", [1], SamplingParameters(max_tokens=99), 0)
    reader.take({"content": "", "tokens": [2], "tokens_predicted": 1}, chunk)
    assert (chunk.token_ids, chunk.finish_reason) == ([], None)
    reader.take({"content": "", "tokens": [], "stop": True, "stop_type": "eos", "timings": {"cache_n": 3}}, chunk)
    assert (chunk.token_ids, chunk.finish_reason, chunk.cached_tokens) == ([2], "stop", 3)


def test_log_probabilities_are_as_many_as_tokens(vocabulary):
    reader, chunk = LlamaFormat(vocabulary), TokenChunk()
    reader.body("m", [1], SamplingParameters(max_tokens=99, logprobs=True, top_logprobs=1), 0)
    score = {"id": 5, "logprob": -1.0, "top_logprobs": [{"id": 5, "logprob": -1.0}]}
    reader.take({"content": "a", "tokens": [5], "tokens_predicted": 1, "completion_probabilities": [score]}, chunk)
    reader.take({"content": "", "tokens": [2], "tokens_predicted": 2, "completion_probabilities": [score]}, chunk)
    reader.take({"content": "", "tokens": [], "stop": True, "stop_type": "eos"}, chunk)
    assert (chunk.token_ids, chunk.logprobs) == ([5, 2], [-1.0, float("-inf")])
    assert chunk.top_logprobs == [[(5, -1.0)], []]


def test_text_without_token_ids_is_no_answer():
    reader = OpenAIFormat()
    reader.take({"choices": [{"text": "", "token_ids": [3]}]}, TokenChunk())
    reader.take({"choices": [{"text": "held back before"}]}, TokenChunk())
    with pytest.raises(HopBrokenError, match="token ids"):
        OpenAIFormat().take({"choices": [{"text": "hello", "finish_reason": "stop"}]}, TokenChunk())


def test_only_stated_parameters_are_sent(vocabulary):
    stated = SamplingParameters(temperature=0.0, top_k=5, repetition_penalty=1.1).resolved(100, 7)
    body = OpenAIFormat().body("m", [1, 2], stated, 3)
    assert {name: body[name] for name in body if name not in ("stream", "stream_options")} == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 4,
        "temperature": 0.0,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    assert LlamaFormat(vocabulary).body("m", [1], stated, 0)["repeat_penalty"] == 1.1
    with pytest.raises(InvalidRequestError, match=r"llama\.cpp"):
        LlamaFormat(vocabulary).body("m", [1], SamplingParameters(min_tokens=2), 0)


@pytest.mark.parametrize(
    ("stated", "goes_on", "exact"),
    [
        ({"temperature": 0.0}, True, True),
        ({"temperature": 0.0, "presence_penalty": 1.0}, False, True),
        ({"seed": 1}, False, True),
        ({}, True, False),
        ({"structured_outputs": '{"json_object": true}'}, False, True),
    ],
)
def test_how_an_answer_goes_on(stated, goes_on, exact):
    sampling = SamplingParameters.model_validate(stated)
    assert (continues(sampling), is_exact(sampling)) == (goes_on, exact)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"<html>", HopBrokenError),
        (b"[1]", HopBrokenError),
        (b'{"error": {"message": "no", "code": 400}}', InvalidRequestError),
        (b'{"error": "dead"}', HopBrokenError),
        (b'{"object": "error", "error": {"message": "x", "code": "500"}}', HopBrokenError),
    ],
)
def test_errors_in_events_are_errors(data, error):
    with pytest.raises(error):
        parsed(data)


def event(text, **delta):
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}
    return json.dumps({"id": "a", "model": "served", "choices": [choice]}).encode()


def test_what_the_client_has_is_left_out_of_a_repetition():
    answer = PassedAnswer("/chat/completions", {"messages": [], "tools": [1]}, "mine")
    for piece in ("On", "ce "):
        answer.take(event(piece, role="assistant"))
    _, body, how = answer.continuing("openai", "", None)
    assert (body, how) == ({"messages": [], "tools": [1]}, "exact")
    assert answer.take(event("Onc", role="assistant")) == (b"", "")
    data, text = answer.take(event("e upon"))
    assert (text, json.loads(data)["choices"][0]["delta"]["content"]) == ("upon", "upon")
    repeated = PassedAnswer("/chat/completions", {"messages": [], "tools": [1]}, "mine")
    repeated.take(event("Once"))
    repeated.continuing("openai", "", None)
    with pytest.raises(RepetitionError):
        repeated.take(event("Twice"))


def test_an_answer_of_text_goes_on_from_it():
    answer = PassedAnswer(
        "/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, "mine"
    )
    answer.take(event("On"))
    answer.take(event("ce"))
    _, body, how = answer.continuing("vllm", "", None)
    assert how == "approximate"
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}
    assert (body["max_tokens"], body["continue_final_message"], body["add_generation_prompt"]) == (3, True, False)
    ids = PassedAnswer("/completions", {"prompt": [1, 2]}, "mine")
    ids.take(json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}).encode())
    with pytest.raises(HeadraceError, match="token ids"):
        ids.continuing("openai", "", None)


def shown_by_ids(body, *texts, kind="vllm"):
    """An answer at that engine: a token a text, of which the first has the id 10."""
    answer = PassedAnswer("/chat/completions" if "messages" in body else "/completions", body, "mine")
    assert answer.first(kind).get("return_token_ids") is (True if kind == "vllm" else None)
    for number, text in enumerate(texts):
        choice = {"index": 0, "finish_reason": None, "token_ids": [10 + number]}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        written, _ = answer.take(json.dumps({"id": "a", "choices": [choice], "prompt_token_ids": [1, 2]}).encode())
        assert json.loads(written)["choices"][0]["token_ids"] is None
    return answer


def test_an_answer_goes_on_behind_the_last_id_whose_text_was_shown():
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "min_tokens": 9, "tool_choice": "none"}
    answer = shown_by_ids(body, "a", "b", "")
    assert answer.shown_ids("vllm") == [1, 2, 10, 11]
    path, again, how = answer.continuing("vllm", "xab", 100)
    assert (path, how, again) == (
        "/completions",
        "exact",
        {"prompt": [1, 2, 10, 11], "max_tokens": 96, "min_tokens": 7, "temperature": 0, "return_token_ids": True},
    )
    written, text = answer.take(b'{"id": "b", "choices": [{"index": 0, "text": "c", "token_ids": [12]}]}')
    assert (text, json.loads(written)["choices"][0]["delta"], json.loads(written)["id"]) == ("c", {"content": "c"}, "a")
    assert answer.shown_ids("vllm") == [1, 2, 10, 11, 12]


@pytest.mark.parametrize(
    ("changed", "kind", "text", "path", "how"),
    [
        ({}, "vllm", "ab", "/completions", "exact"),
        ({"temperature": 1}, "headrace", "ab", "/completions", "approximate"),
        ({"presence_penalty": 1}, "vllm", "ab", "/completions", "approximate"),
        ({}, "vllm", "ax", "/chat/completions", "approximate"),
        ({}, "vllm", "", "/chat/completions", "approximate"),
        ({}, "openai", "ab", "/chat/completions", "approximate"),
    ],
)
def test_ids_serve_where_the_engine_makes_the_shown_text_of_them(changed, kind, text, path, how):
    answer = shown_by_ids({"messages": [], "temperature": 0, "max_tokens": 9, **changed}, "a", "b")
    if kind == "openai":
        assert not answer.shown_ids(kind)
        text = ""
    found, body, label = answer.continuing(kind, text, None)
    assert (found, label) == (path, how)
    assert ("messages" in body) == (path == "/chat/completions")


@pytest.mark.parametrize(
    "further",
    [
        {"n": 2},
        {"tools": [1]},
        {"logprobs": True},
        {"guided_json": {"type": "object"}},
        {"include_reasoning": False},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_ids_are_asked_for_where_an_answer_has_nothing_but_text(further):
    answer = PassedAnswer("/chat/completions", {"messages": [], **further}, "mine")
    assert "return_token_ids" not in answer.first("vllm")
