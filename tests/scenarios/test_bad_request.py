"""`bad_request`: a wrong call affects no other call, neither beside it nor after it.

While streams run on both text models, each wrong request is refused at once by its own status, and so is one whose
model step fails; the streams get their whole answers, and the next right call works. A dead engine is
reported, its process is restarted, and its streams go on.
"""

import asyncio
import sys

import grpc
import numpy as np
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor
from tests.chaos.load import Client
from tests.chaos.oracle import Oracle
from tests.chaos.predictor import FAILS
from tests.chaos.requests import Story, greedy
from tests.scenarios.crowd import Crowd, stories_of
from tests.system.calls import generate, ids_request, infer, rest, serves, text_of, text_request
from tests.waiting import until

CALLERS = 8
TOKENS = 60
DATES = [Story(prompt, (("temperature", 0.0),), "normalizer") for prompt in ("date: 3 Mar 2021", "date: 7 May 1999")]
STORIES = [*stories_of(TOKENS)[:: 16 // CALLERS], *DATES]  # Half of each kind.
CHAT = {"model": "normalizer", "messages": [{"role": "user", "content": "date: 3 Mar 2021"}]}
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
IDS = np.array([5, 6, 7], dtype=np.int64)

GENERATE = {
    "empty prompt": ({"prompt": ""}, INVALID, "the prompt is empty"),
    "neither prompt nor messages": ({"prompt": None}, INVALID, "give one of a prompt, its ids and messages"),
    "prompt too long": ({"prompt": "once " * 1500}, INVALID, "the context is 1024"),
    "prompt of megabytes": ({"prompt": "x" * 3_000_000}, INVALID, "the prompt has 3000000 bytes"),
    "temperature": ({"temperature": -1}, INVALID, "temperature=-1"),
    "max_tokens": ({"max_tokens": 5000}, INVALID, "max_tokens=5000"),
}

PREDICTOR = {
    "dtype": ("storyteller", Tensor("input_ids", "FP32", IDS.astype(np.float32)), {}, INVALID, "must be INT64"),
    "shape": ("storyteller", Tensor("input_ids", "INT64", IDS.reshape(3, 1)), {}, INVALID, "shape [N] or [1, N]"),
    "token id": ("storyteller", Tensor("input_ids", "INT64", IDS + 10**6), {}, INVALID, "token id 1000005"),
    "too long": ("storyteller", Tensor("input_ids", "INT64", np.repeat(IDS, 400)), {}, INVALID, "1200 tokens"),
    "parameter": ("storyteller", Tensor("input_ids", "INT64", IDS), {"max_tokens": 0}, INVALID, "max_tokens=0"),
}

COMPLETION = {"model": "storyteller", "prompt": "Once"}
MESSAGES = {"model": "storyteller", "messages": [{"role": "user", "content": "Hello"}]}
REST = {
    "prompt missing": ("/v1/completions", {"model": "storyteller"}, 400, "prompt: Field required"),
    "prompt too long": ("/v1/completions", {**COMPLETION, "prompt": "once " * 1500}, 400, "the context is 1024"),
    "temperature": ("/v1/completions", {**COMPLETION, "temperature": "hot"}, 400, "temperature='hot'"),
    "not supported": ("/v1/completions", {**COMPLETION, "best_of": 2}, 400, "best_of=2 is not supported"),
    "not JSON": ("/v1/completions", b"{", 400, "JSON"),
    "too many messages": (
        "/v1/chat/completions",
        {**MESSAGES, "messages": MESSAGES["messages"] * 5000},
        400,
        "at most 4096",
    ),
    "body of megabytes": ("/v1/completions", {**COMPLETION, "prompt": "x" * 9_000_000}, 400, "more than any prompt"),
    "unsupported endpoint": ("/openai/v1/chat/completions", CHAT, 400, "chat"),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The FAULTS folder of tests.chaos.predictor."""
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, faults):
    async with stacks.use(
        commands={"predictor": (sys.executable, "-m", "tests.chaos.predictor")},
        environment={"predictor": {"FAULTS": str(faults)}},
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="module")
async def oracle(stack):
    """The right answers of all stories."""
    oracle = Oracle()
    async with Client(stack.gateway) as client:
        await oracle.record_answers(client, STORIES)
    return oracle


@pytest_asyncio.fixture
async def beside(stack, oracle):
    """Streams that run beside the test, and must be right in the end."""
    async with Client(stack.gateway) as client:
        async with Crowd(client, STORIES, len(STORIES)) as crowd:
            await until(lambda: sum(bool(call.pieces) for call in crowd.calls) >= CALLERS)
            yield crowd
        crowd.all_right(oracle)
        assert (await client.send(crowd.calls[0].request)).text == oracle.answers[
            crowd.calls[0].request.required_story
        ].text


async def refused_by_generate(gateway, change, status, text):
    fields = {"model": "storyteller", "prompt": "Once", **change}
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(gateway, **{name: value for name, value in fields.items() if value is not None})
    assert raised.value.code() is status
    assert text in raised.value.details()
    assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "transformer"


async def refused_by_predictor(gateway, model, tensor, parameters, status, text):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await infer(gateway, ids_request(model, tensor, **parameters), authority="predictor")
    assert raised.value.code() is status
    assert text in raised.value.details()
    assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "predictor"


async def refused_by_rest(gateway, path, body, status, text):
    for stream in (False, True):
        answer = await rest(gateway, "POST", path, body | {"stream": stream} if isinstance(body, dict) else body)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert answer.headers["x-failed-hop"] == "transformer"
        assert text in answer.json["error"]["message"]
        assert not any(name.startswith("grpc-") or name == "x-http-status" for name in answer.headers)


async def test_every_wrong_request_is_refused_with_its_own_status_and_the_streams_beside_it_are_right(stack, beside):
    await asyncio.gather(
        *(refused_by_generate(stack.gateway, *case) for case in GENERATE.values()),
        *(refused_by_predictor(stack.gateway, *case) for case in PREDICTOR.values()),
        *(refused_by_rest(stack.gateway, *case) for case in REST.values()),
    )


async def test_a_very_long_refusal_affects_no_other_call(stack, beside):
    long = "9" * 100_000

    def with_parameter(name, value):
        request = text_request("storyteller", "Once")
        request.parameters[name].string_param = value
        return request

    bad = [with_parameter("temperature", long), with_parameter(long, "1"), text_request(long, "Once")]
    for authority in (None, "predictor"):
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await infer(stack.gateway, request, authority)
            assert raised.value.code() in (INVALID, NOT_FOUND)


async def test_a_request_that_fails_in_the_model_fails_alone(stack, beside):
    for _ in range(4):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=9, seed=FAILS, ignore_eos=True)
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "predictor"
        assert "Injected" not in raised.value.details()


async def test_a_step_that_fails_once_affects_no_stream(stack, faults, beside):
    raising = faults / f"raise-{stack.addresses['predictor-0'].rpartition(':')[2]}"
    for _ in range(3):
        raising.touch()
        await until(lambda: not raising.exists())


async def test_a_dead_engine_is_reported_and_replaced_and_its_streams_go_on(stack, faults, beside):
    predictor, process = stack.addresses["predictor-0"], stack.pid("predictor-0")
    assert await serves(predictor, "ready")
    (faults / f"dead-{predictor.rpartition(':')[2]}").touch()

    async def is_reported():
        return not await serves(predictor, "ready")

    await until(is_reported)
    await until(lambda: "another engine serves it" in stack.log("predictor-0"))
    await stack.wait_ready(60)
    assert stack.pid("predictor-0") == process
    story = greedy("Once upon a time", 5)
    assert text_of(await generate(stack.gateway, model="storyteller", prompt=story.prompt, **story.parameters))
