"""A client that lost its connection continues at another transformer, which knows nothing of it."""

import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import grpc
import orjson
import pytest
from tokenizers import Tokenizer

from headrace_protos import headrace_pb2 as pb
from headrace_protos import headrace_pb2_grpc
from headrace_transformer.generation import resume_ids
from tests.support.events import read_events
from tests.support.full import usually
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, breaks, serving
from tests.support.status import code_of
from tests.support.transformer_fixtures import transformer

STORY = "Once upon a time there was a little mill — “an old one”, said the miller — by the river."
TELLER = f"{MODEL}=models/storyteller"
OLD, NEW = "0" * 31 + "1", "0" * 31 + "2"
ACCEPT = ("accept", "text/event-stream")
BODY = {"model": MODEL, "prompt": "Tell me", "max_tokens": 200, "stream": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 200, "stream": True}
SHAPES = {
    "plain": ("Completions", BODY),
    "chat with usage": ("ChatCompletions", CHAT | {"stream_options": {"include_usage": True}}),
    "continuous usage": (
        "Completions",
        BODY | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop": ("Completions", BODY | {"stop": ["little mill", "old"], "stream_options": {"include_usage": True}}),
    "logprobs": ("Completions", BODY | {"logprobs": 1, "stop": "by the"}),
    "echo": ("Completions", BODY | {"echo": True}),
}


@pytest.fixture(scope="module")
def answer():
    return Tokenizer.from_file("models/storyteller/tokenizer.json").encode(STORY, add_special_tokens=False).ids


class ServesOne(ScriptedPredictor):
    """Knows all of its models, and generates with `served` alone."""

    def _step(self, is_leaving=False):
        step = super()._step(is_leaving)
        for load in [load for load in step.loads.models if load.model != self.served]:
            step.loads.models.remove(load)
        return step


@asynccontextmanager
async def two_transformers(*predictors, models=TELLER, **options):
    """Both in front of all predictors."""
    async with AsyncExitStack() as running:
        addresses = [await running.enter_async_context(serving(predictor)) for predictor in predictors]
        yield [
            (await running.enter_async_context(transformer(addresses[0], models, replicas=addresses, **options)))[0]
            for _ in range(2)
        ]


async def events(stub, method, body, *headers):
    answer = await stub.openai(method, orjson.dumps(body), headers)
    assert answer.status == 200, answer.data
    return read_events(answer.data)


async def refusal(stub, method, body, *headers):
    answer = await stub.openai(method, orjson.dumps(body), headers)
    return answer.status, orjson.loads(answer.data)["error"]


class Received(NamedTuple):
    """What a client has of an answer, however it was divided into events."""

    text: str
    logprobs: list
    others: list
    heads: set

    def __add__(self, other):
        return Received(*(a | b if isinstance(a, set) else a + b for a, b in zip(self, other, strict=True)))


def contents(events):
    text, logprobs, others, heads = "", [], [], set()
    for event in events:
        if event.data == "[DONE]":
            others.append(event.data)
            continue
        chunk = orjson.loads(event.data)
        heads.add((chunk["id"], chunk["created"], chunk["object"], chunk["model"]))
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("text", "") + delta.get("content", "")
            for name, values in (choice["logprobs"] or {}).items():
                logprobs += [(name, value) for value in values or ()]
            others += [value for value in (delta.get("role"), choice["finish_reason"]) if value]
        if not chunk["choices"]:
            others.append(chunk["usage"])
    return Received(text, sorted(logprobs, key=lambda pair: pair[0]), others, heads)


def ordered(received):
    return received._replace(logprobs=sorted(received.logprobs, key=lambda pair: pair[0]))


@pytest.mark.parametrize("shape", usually(("chat with usage", "logprobs", "echo"), SHAPES))
async def test_after_each_event_the_other_transformer_sends_exactly_the_rest(answer, shape):
    method, body = SHAPES[shape]
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor) as (first, second):
        whole = await events(first, method, body, ACCEPT)
        assert whole[-1].data == "[DONE]"
        assert len({event.id for event in whole[:-1]}) == len(whole) - 1
        for count in range(1, len(whole)):
            predictor.script += [breaks(3)] if count % 4 == 0 else []
            rest = await events(second, method, body, ACCEPT, ("last-event-id", whole[count - 1].id))
            assert ordered(contents(whole[:count]) + contents(rest)) == contents(whole)
            last = [event.id.rsplit(".", 2)[0] for event in (whole[-1], rest[-1]) if event.id]
            assert len({*last}) == 1


async def test_events_have_ids_for_clients_that_ask_for_events_and_for_one_answer(answer):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor) as (stub, _):
        for body, headers, have_ids in (
            (BODY, [ACCEPT], True),
            (BODY, [("accept", "application/json, text/event-stream;q=0.9")], True),
            (BODY, [], False),
            (BODY, [("accept", "*/*")], False),
            (BODY, [("idempotency-key", "k")], False),
            (BODY | {"n": 2}, [ACCEPT], False),
            (BODY | {"prompt": ["a", "b"]}, [ACCEPT], False),
        ):
            came = await events(stub, "Completions", body, *headers)
            assert {bool(event.id) for event in came} == {have_ids}
        predictor.fingerprint = ""
        assert not any(event.id for event in await events(stub, "Completions", BODY, ACCEPT))


async def test_wrong_ids_are_refused_at_once(answer, monkeypatch):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor) as (first, second):
        [one, *_] = await events(first, "Completions", BODY, ACCEPT)
        for body, id, text in (
            (BODY, "7", "not an id of this server"),
            (BODY, "x" * 5000, "not an id of this server"),
            (BODY | {"temperature": 0.5}, one.id, "of another request"),
            (BODY | {"n": 2}, one.id, "of another request"),
            (BODY | {"stream": False}, one.id, "of another request"),
        ):
            status, error = await refusal(second, "Completions", body, ("last-event-id", id))
            assert (status, error["param"], text in error["message"]) == (400, "resume_from", True)
        now = time.time()
        monkeypatch.setattr(resume_ids.time, "time", lambda: now + 302)
        status, error = await refusal(second, "Completions", BODY, ("last-event-id", one.id))
        assert (status, error["code"]) == (410, "failed_precondition")
        assert len(predictor.calls) == 1


async def test_other_weights_never_continue_an_answer(answer):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor, wait_s=0.3) as (first, second):
        one = (await events(first, "Completions", BODY, ACCEPT))[3]
        predictor.fingerprint = NEW
        status, error = await refusal(second, "Completions", BODY, ("last-event-id", one.id))
        assert (status, error["message"]) == (
            502,
            "the model's weights have changed, and no predictor has the old ones",
        )
        # Without an id it is a request like any other, and other tokens under the old name are noticed.
        assert await events(second, "Completions", BODY)
        predictor.fingerprint, predictor.answer = OLD, [7, *answer[1:]]
        status, error = await refusal(second, "Completions", BODY, ("last-event-id", one.id))
        assert (status, "could not be repeated" in error["message"]) == (502, True)


async def test_of_several_predictors_the_one_with_the_old_weights_continues(answer):
    old = ScriptedPredictor(answer=answer, fingerprint=OLD)
    new = ScriptedPredictor(answer=answer[::-1], fingerprint=NEW)
    async with two_transformers(old, new) as stubs:
        number = 0
        while number < 6 or not (old.calls and new.calls):  # Each request goes to either.
            whole = await events(stubs[0], "Completions", BODY, ACCEPT)
            at = number % 6
            rest = await events(stubs[1], "Completions", BODY, ("last-event-id", whole[at].id))
            assert ordered(contents(whole[: at + 1]) + contents(rest)) == contents(whole)
            number += 1


async def test_behind_a_route_the_model_that_answered_continues_and_a_key_keeps_to_one(answer, tmp_path):
    routes = tmp_path / "routes.yaml"
    routes.write_text("either: {split: [{model: a, weight: 1}, {model: b, weight: 1}]}")
    predictors = []
    for name, tokens, fingerprint in (("a", answer, OLD), ("b", answer[::-1], NEW)):
        predictors.append(ServesOne(answer=tokens, models=("a", "b"), fingerprint=fingerprint))
        predictors[-1].served = name
    method, body = "Completions", BODY | {"model": "either"}
    models = "a=models/storyteller,b=models/storyteller"
    async with AsyncExitStack() as running:
        addresses = [await running.enter_async_context(serving(predictor)) for predictor in predictors]
        first, second = [
            (await running.enter_async_context(transformer(addresses[0], models, replicas=addresses, routes=routes)))[0]
            for _ in range(2)
        ]
        answered = set()
        for number in range(10):
            whole = await events(first, method, body, ACCEPT)
            answered.add(contents(whole).text)
            rest = await events(second, method, body, ("last-event-id", whole[number].id))
            assert ordered(contents(whole[: number + 1]) + contents(rest)) == contents(whole)
        assert len(answered) == 2
        by_key = [
            {contents(await events(stub, method, body, ("idempotency-key", str(key)))).text for stub in (first, second)}
            for key in range(10)
        ]
        assert {len(texts) for texts in by_key} == {1}
        assert set.union(*by_key) == answered


async def test_a_key_gives_a_repeated_request_the_seed_and_the_id_of_the_first(answer):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    body = BODY | {"stream": False, "n": 2, "prompt": ["a", "a"]}

    async def sent(stub, body, *headers):
        before = len(predictor.calls)
        whole = orjson.loads((await stub.openai("Completions", orjson.dumps(body), headers)).data)
        calls = predictor.calls[before:]
        return whole["id"], sorted(orjson.loads(call.request.sampling)["seed"] for call in calls)

    async with two_transformers(predictor) as (first, second):
        key = ("idempotency-key", "order-1")
        one = await sent(first, body, key)
        assert await sent(second, body, key) == one
        assert len(set(one[1])) == 4
        for other in (
            await sent(second, body, ("idempotency-key", "order-2")),
            await sent(second, body | {"user": "x"}, key),
            await sent(second, body, key, ("x-headrace-client", "alice")),
            await sent(second, body),
        ):
            assert other[0] != one[0]
            assert not {*other[1]} & {*one[1]}
        own = await sent(first, BODY | {"stream": False, "seed": 5}, key)
        assert own[1] == [5]
        status, error = await refusal(first, "Completions", body, ("idempotency-key", "k" * 256))
        assert (status, error["param"]) == (400, "idempotency-key")


# ------------------------------------------------------------------ Generate


async def generated(stub, metadata=(), **fields):
    request = pb.GenerateRequest(**{"model": MODEL, "prompt": "Tell me", "max_tokens": 200, **fields})
    return [r async for r in headrace_pb2_grpc.TextGenerationStub(stub.channel).Generate(request, metadata=metadata)]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="plain", marks=pytest.mark.full),
        pytest.param({"stop": ["old"]}, id="stop"),
        pytest.param({"logprobs": True}, id="logprobs"),
    ],
)
async def test_generate_continues_after_each_response(answer, fields):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor) as (first, second):
        whole = await generated(first, request_id="one", **fields)
        for count in range(1, len(whole) + 1):
            last = whole[count - 1]
            rest = await generated(second, request_id="other", resume_from=last.resume_id, **fields)
            assert joined([*whole[:count], *rest]) == joined(whole)


def joined(responses):
    """What a client has of an answer."""
    ids, logprobs, last = [], [], responses[-1]
    for response in responses:
        ids += response.token_ids
        logprobs += response.logprobs
    ends = [response.finish_reason for response in responses if response.finish_reason]
    resume_id = last.resume_id.rsplit(".", 2)[0]  # Without its age.
    return "".join(response.text for response in responses), ids, logprobs, ends, last.usage, resume_id


async def test_generate_refuses_wrong_ids_and_takes_keys(answer):
    predictor = ScriptedPredictor(answer=answer, fingerprint=OLD)
    async with two_transformers(predictor) as (first, second):
        [one, *_] = await generated(first)
        for fields in ({"resume_from": "x"}, {"resume_from": one.resume_id, "top_k": 3}):
            assert await code_of(generated(second, **fields)) is grpc.StatusCode.INVALID_ARGUMENT
        for stub in (first, second):
            await generated(stub, (("idempotency-key", "k"),))
        seeds = [orjson.loads(call.request.sampling)["seed"] for call in predictor.calls]
        assert seeds[-1] == seeds[-2] != seeds[0]
