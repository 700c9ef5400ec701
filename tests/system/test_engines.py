"""Models at engines of other makers: what passes, what is ours, and answers that survive their engine."""

import asyncio
import json

import grpc
import pytest
import pytest_asyncio

from headrace_protos.inference_pb2 import ModelStatisticsRequest
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.full import FULL, usually
from tests.support.scripted_engine import CLOSE, END, ERROR, HALF, JUNK, NO_DONE, STALL, answers, scripted_engines
from tests.system.calls import records, rest
from tests.waiting import until

FOLDER = "models/storyteller"
TOKENS = 12
AFTER = (0, 1, 5, TOKENS - 1, TOKENS)  # How many tokens a failing engine gives.
MESSAGES = [{"role": "user", "content": "Tell me of the fox."}]
CHAT = {"model": "chat", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "stream": True}
COMPLETION = {"model": "chat", "prompt": "Once", "max_tokens": TOKENS, "temperature": 0, "stream": True}
PASSED = {**CHAT, "model": "passed"}
SETTINGS = {"TRANSFORMER_SILENCE_LIMIT": "2", "TRANSFORMER_PREDICTOR_START_WAIT": "4"}


@pytest_asyncio.fixture(scope="module")
async def engines():
    """Two that give token ids, and two that do not; each pair gives the same answers."""
    async with scripted_engines(FOLDER, "vllm", "vllm", "other", "other") as made:
        yield made


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, engines):
    one, other, plain, further = (engine.address for engine in engines)
    models = f"chat={one}|{other}#served;tokenizer={FOLDER},passed={plain}|{further},ids={one}|{other}"
    models += ",normalizer=models/normalizer"
    async with stacks.use(models=models, environment={"transformer": SETTINGS}) as started:
        await until(lambda: lists(started, {"chat", "passed", "ids"}))
        yield started


@pytest.fixture(autouse=True)
def well(engines):
    for engine in engines:
        engine.fails, engine.refuses, engine.delay_s, engine.salt = answers, None, 0.0, ""
        engine.holds_back, engine.detokenizes = False, True
        engine.requests.clear()


async def lists(stack, names):
    answer = await rest(stack.gateway, "GET", "/v1/models")
    return names <= {card["id"] for card in answer.json["data"]}


async def asked(stack, body, **headers):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await rest(stack.gateway, "POST", path, body, **headers)


def events_of(answer):
    """The events of a stream, each of them whole, and the comments on its continuity."""
    assert answer.status == 200, answer.body
    assert answer.headers["x-headrace-continuity"] in ("exact", "restarted"), answer.headers
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    comments = [block.removeprefix(": x-headrace-continuity: ") for block in blocks if block.startswith(": x-")]
    data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert len(comments) + len(data) == len(blocks)
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data], comments


def texts_of(events):
    """The text of each choice."""
    found = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            calls = delta.get("tool_calls") or ()
            text = (delta.get("content") or delta.get("text") or "") + "".join(
                call["function"].get("arguments", "") for call in calls
            )
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def scores_of(events):
    """The tokens of an answer with one choice, and their log probabilities."""
    given = [choice["logprobs"] for event in events for choice in event["choices"] if choice.get("logprobs")]
    return [[value for one in given for value in one[name]] for name in ("tokens", "token_logprobs")]


def fails_once(engines, at, how=CLOSE):
    """The first request that reaches `at` tokens fails, wherever it is."""
    done = []

    def fails(count):
        if count == at and not done:
            done.append(count)
            return how
        return ""

    for engine in engines:
        engine.fails = fails
    return done


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        {**COMPLETION, "logprobs": 1},
        {**COMPLETION, "n": 2},
        {**CHAT, "temperature": 1, "seed": 3},
        {**COMPLETION, "structured_outputs": {"regex": "[a-z]*"}},
        {**CHAT, "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]},
    ],
    ids=["chat", "logprobs", "two", "seed", "form", "tools"],
)
async def test_an_answer_goes_on_exactly_after_any_token(stack, engines, body):
    undisturbed = await asked(stack, body)
    whole, comments = events_of(undisturbed)
    assert not comments
    for at in AFTER:
        done = fails_once(engines, at)
        disturbed, comments = events_of(await asked(stack, body))
        assert texts_of(disturbed) == texts_of(whole)
        assert done or at == TOKENS
        assert set(comments) == ({"exact"} if 0 < at < TOKENS else {"restarted"} if at == 0 else set()), at
        assert scores_of(disturbed) == scores_of(whole)


@pytest.mark.parametrize("how", [CLOSE, HALF, ERROR, END, JUNK])
async def test_every_way_to_fail_is_seen(stack, engines, how):
    whole, _ = events_of(await asked(stack, CHAT))
    assert fails_once(engines, 5, how) == []
    disturbed, comments = events_of(await asked(stack, CHAT))
    assert (texts_of(disturbed), comments) == (texts_of(whole), ["exact"])


async def test_an_answer_without_done_is_whole(stack, engines):
    whole, _ = events_of(await asked(stack, CHAT))
    fails_once(engines, TOKENS, NO_DONE)
    assert texts_of(events_of(await asked(stack, CHAT))[0]) == texts_of(whole)


async def test_an_engine_that_hangs_is_left(stack, engines):
    whole, _ = events_of(await asked(stack, CHAT))
    hung = []

    def fails(engine):
        def stalls(count):
            if hung in ([], [engine]) and count == 4:
                hung[:] = [engine]
            return STALL if hung == [engine] else ""

        return stalls

    for engine in engines[:2]:
        engine.fails = fails(engine)
    disturbed, comments = events_of(await asked(stack, CHAT))
    assert (texts_of(disturbed), comments) == (texts_of(whole), ["exact"])


async def test_a_sample_without_a_seed_goes_on_as_an_approximation(stack, engines):
    body = {**CHAT, "temperature": 1}
    whole, _ = events_of(await asked(stack, body))
    assert "seed" not in engines[0].requests[0][1] if engines[0].requests else True
    fails_once(engines, 5)
    disturbed, comments = events_of(await asked(stack, body, x_request_id="approximate"))
    assert (texts_of(disturbed), comments) == (texts_of(whole), ["approximate"])
    (record,) = await records(stack.gateway, request_id="approximate")
    assert (record.continuity, record.resumes, record.status) == ("approximate", 1, "OK")
    assert record.text == texts_of(whole)[0]


async def test_the_usage_is_counted_here(stack):
    body = {**CHAT, "stream_options": {"include_usage": True}}
    events, _ = events_of(await asked(stack, body))
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["prompt_tokens"] < 100


async def counts_of(stack, model):
    """Successes and failures of the model's requests at engines, and its tokens' counts that must be equal."""
    found = (await rest(stack.gateway, "GET", f"/v2/models/{model}/stats")).json["model_stats"]
    (row,) = [each for each in found if each["name"] == model]
    counted = {name: int(each.get("count", 0)) for name, each in row.get("inference_stats", {}).items()}
    parts = {counted.get(name, 0) for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")}
    assert parts == {int(row.get("inference_count", 0))}, row
    return counted.get("success", 0), counted.get("fail", 0)


@pytest.mark.parametrize("body", [CHAT, PASSED], ids=["ids", "text"])
@pytest.mark.parametrize("how", usually((CLOSE, NO_DONE, ""), [CLOSE, HALF, ERROR, END, JUNK, NO_DONE, ""]))
async def test_each_request_at_an_engine_is_counted(stack, engines, body, how):
    successes, failures = await counts_of(stack, body["model"])
    fails_once(engines, TOKENS if how == NO_DONE else 5, how)
    events_of(await asked(stack, body))
    assert await counts_of(stack, body["model"]) == (successes + 1, failures + (how not in ("", NO_DONE)))
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelStatistics(ModelStatisticsRequest())
    assert {"chat", "passed", "ids", "normalizer"} <= {row.name for row in answer.model_stats}


async def test_a_refusal_has_the_engines_words(stack, engines):
    for engine in engines:
        engine.refuses = (400, {"error": {"message": "top_n_sigma must be positive", "code": 400}})
    for model in ("chat", "passed"):
        answer = await asked(stack, {**CHAT, "model": model})
        assert answer.status == 400
        assert answer.json["error"]["message"] == "top_n_sigma must be positive"
        assert answer.headers["x-failed-hop"] == "engine"


async def test_cancels_reach_the_engine(stack, engines):
    for engine in engines:
        engine.delay_s = 0.2
    for model in ("chat", "passed"):
        counted = await counts_of(stack, model)
        body = {**CHAT, "model": model, "max_tokens": 900}
        for _ in range(25 if FULL else 1):
            await asyncio.gather(*(cut_off(stack, body) for _ in range(20)))
        await until(lambda: not any(engine.running for engine in engines), 1 if FULL else 60)
        assert await counts_of(stack, model) == counted


async def cut_off(stack, body):
    """Sends a request, and leaves after the first event."""
    reader, writer = await asyncio.open_connection(*stack.gateway.split(":"))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    while b"data: " not in await reader.readline():
        pass
    writer.transport.abort()


async def test_a_model_without_its_tokenizer_passes_as_it_is(stack, engines):
    body = {**PASSED, "stream": False, "response_format": {"type": "json_object"}, "anything": [1]}
    answer = await asked(stack, body, x_request_id="passed")
    assert answer.json["model"] == "passed"
    ((path, given, _),) = engines[2].requests + engines[3].requests
    assert (path, given) == ("/v1/chat/completions", body | {"model": "served"})
    (record,) = await records(stack.gateway, request_id="passed")
    assert (record.text, record.status) == (answer.json["choices"][0]["message"]["content"], "OK")


async def test_a_passed_stream_goes_on_from_its_text(stack, engines):
    whole, _ = events_of(await asked(stack, PASSED))
    for at in AFTER:
        done = fails_once(engines, at)
        disturbed, comments = events_of(await asked(stack, PASSED))
        assert len({event["id"] for event in disturbed}) == 1
        text, expected = texts_of(disturbed)[0], texts_of(whole)[0]
        assert text.startswith(expected[: expected.index(">") * at]) or at == 0
        assert text.count("<") == text.count(">") == TOKENS
        assert set(comments) == ({"approximate"} if 0 < at < TOKENS else {"restarted"} if at == 0 else set()), (
            at,
            done,
        )


@pytest.mark.parametrize("holds_back", [False, True], ids=["whole", "held back"])
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_a_passed_stream_goes_on_exactly_by_the_ids_of_its_engine(stack, engines, body, holds_back):
    body = {**body, "model": "ids", "stream_options": {"include_usage": True}}
    for engine in engines:
        engine.holds_back = holds_back
    whole, _ = events_of(await asked(stack, body))
    for at in range(1, TOKENS):
        fails_once(engines, at)
        disturbed, (comment,) = events_of(await asked(stack, body))
        assert texts_of(disturbed) == texts_of(whole)
        assert comment == "exact" or (comment == "restarted" and holds_back)
        assert len({(event["id"], event["object"]) for event in disturbed}) == 1
        assert not [choice for event in disturbed for choice in event["choices"] if choice["token_ids"]]
    assert disturbed[-1]["usage"]["completion_tokens"] == TOKENS


async def test_ids_that_do_not_make_the_text_are_not_used(stack, engines):
    body = {**CHAT, "model": "ids"}
    for engine in engines:
        engine.detokenizes = False
    fails_once(engines, 5)
    disturbed, comments = events_of(await asked(stack, body))
    assert (texts_of(disturbed)[0].count("<"), comments) == (TOKENS, ["approximate"])


async def test_ids_that_were_asked_for_are_passed(stack, engines):
    body = {**CHAT, "model": "ids", "return_token_ids": True}
    fails_once(engines, 5)
    events, _ = events_of(await asked(stack, body))
    ids = [token_id for event in events for choice in event["choices"] for token_id in choice["token_ids"]]
    assert texts_of(events)[0] == "".join(f"<{token_id}>" for token_id in ids)
    assert events[0]["prompt_token_ids"]


@pytest.mark.parametrize(
    "further", [{"n": 2}, {"tools": [{"type": "function", "function": {"name": "find"}}]}], ids=["two", "tools"]
)
async def test_a_passed_answer_with_more_than_text_is_repeated(stack, engines, further):
    body = PASSED | further
    whole, _ = events_of(await asked(stack, body))
    for at in (1, 5, TOKENS - 1):
        fails_once(engines, at)
        disturbed, comments = events_of(await asked(stack, body))
        assert (texts_of(disturbed), set(comments)) == (texts_of(whole), {"exact"})
        ids = [call.get("id") for event in disturbed for call in event["choices"][0]["delta"].get("tool_calls") or ()]
        assert len({one for one in ids if one}) <= 1


async def test_another_answer_ends_with_an_error(stack, engines):
    def fails(count):
        changes = count == 5 and not engines[2].salt
        engines[2].salt = engines[3].salt = "another" if changes else engines[2].salt
        return CLOSE if changes else ""

    engines[2].fails = engines[3].fails = fails
    answer = await asked(stack, PASSED | {"tools": [{"type": "function", "function": {"name": "find"}}]})
    assert "does not repeat the answer's beginning" in answer.body.decode()
    assert not answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "body",
    [
        {
            **CHAT,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,"}}]}],
        },
        {**COMPLETION, "echo": True, "logprobs": 1},
        {**CHAT, "prompt_logprobs": 1},
    ],
    ids=["images", "echo", "prompt_logprobs"],
)
async def test_what_the_transformer_cannot_do_passes(stack, engines, body):
    events_of(await asked(stack, body))
    ((path, given, _),) = engines[0].requests + engines[1].requests
    assert path == "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert given == body | {"model": "served"}


async def test_embeddings_pass(stack):
    answer = await rest(stack.gateway, "POST", "/v1/embeddings", {"model": "passed", "input": "a"})
    assert (answer.status, answer.json["data"]) == (200, [{"embedding": [0.5]}])


async def test_refused_requests_cut_no_other_answer(stack, engines):
    for engine in engines:
        engine.delay_s = 0.1
    beside = [asyncio.create_task(asked(stack, {**CHAT, "model": model})) for model in ("chat", "passed")]
    await until(lambda: len([one for engine in engines for one in engine.requests]) == 2)
    for engine in engines:
        engine.refuses = (500, {"error": {"message": "no such grammar"}})
    refused = await asked(stack, {**CHAT, "model": "passed"}, x_timeout_ms="3000")
    assert refused.status in (502, 503, 504)
    for answer in beside:
        assert events_of(await answer)[1] == []


@pytest.mark.parametrize("body", [{"model": {}}, {"messages": 1}, [1]])
async def test_malformed_requests_are_refused_at_once(stack, body):
    answer = await rest(stack.gateway, "POST", "/v1/chat/completions", body)
    assert answer.status == 400, answer.body


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_apis_that_the_engine_has_pass(stack, engines, path):
    body = {"model": "passed", "input": "a", "messages": MESSAGES, "max_tokens": 4}
    answer = await rest(stack.gateway, "POST", path, body)
    assert (answer.status, answer.json) == (200, {"id": "r", "model": "passed", "output": ["a"]})
    fails_once(engines, 0)
    answer = await rest(stack.gateway, "POST", path, body | {"stream": True})
    pieces = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert [piece["at"] for piece in pieces] == [0, 1, 2, 3]
    assert {piece["model"] for piece in pieces} == {"passed"}
    fails_once(engines, 2)
    answer = await rest(stack.gateway, "POST", path, body | {"stream": True})
    assert b"error" in answer.body
    assert b'"at": 2' not in answer.body


async def test_the_first_token_has_a_deadline(stack, engines):
    for engine in engines:
        engine.delay_s = 5
    for model in ("chat", "passed"):
        answer = await asked(stack, {**CHAT, "model": model}, x_first_token_timeout_ms="300")
        assert answer.status == 504 or b"no token within 300 ms" in answer.body, answer.body


async def test_requests_wait_for_an_engine_that_starts_again(stack, engines):
    for engine in engines[:2]:
        await engine.stop()
    waiting = asyncio.create_task(asked(stack, CHAT))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    for engine in engines[:2]:
        await engine.start()
    events_of(await waiting)
