"""`bad_request`: a wrong call affects no other call, neither beside it nor after it.

While streams run on both text models, each wrong request is refused at once by its own status, and so is one whose
model step fails; the streams get their whole answers, and the next right call works. A dead engine is
reported, its process is restarted, and its streams go on.
"""

import asyncio
import sys

import grpc
import pytest
import pytest_asyncio

from tests.chaos.health import serves
from tests.chaos.load import Client
from tests.chaos.oracle import Oracle
from tests.chaos.predictor import FAILS
from tests.chaos.requests import Story, greedy
from tests.scenarios.crowd import Crowd, stories_of
from tests.system.calls import generate, ids_request, infer, rest, text_of
from tests.system.test_refusals import GENERATE, PREDICTOR, REST
from tests.waiting import until

CALLERS = 8
TOKENS = 60
DATES = [Story(prompt, (("temperature", 0.0),), "normalizer") for prompt in ("date: 3 Mar 2021", "date: 7 May 1999")]
STORIES = [*stories_of(TOKENS)[:: 16 // CALLERS], *DATES]  # Half of each kind.
CHAT = {"model": "normalizer", "messages": [{"role": "user", "content": "date: 3 Mar 2021"}]}


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


async def refused_by_predictor(gateway, model, tensor, parameters, status, text):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await infer(gateway, ids_request(model, tensor, **parameters), authority="predictor")
    assert raised.value.code() is status
    assert text in raised.value.details()


async def refused_by_rest(gateway, path, body, status, text):
    answer = await rest(gateway, "POST", path, body)
    assert answer.status == status
    assert text in answer.json["error"]["message"]


async def test_an_unsupported_endpoint_is_refused_and_blocks_no_later_call(stack, beside):
    for _ in range(10):
        answer = await rest(stack.gateway, "POST", "/openai/v1/chat/completions", CHAT)
        assert (answer.status, answer.headers["x-failed-hop"]) == (400, "transformer")
        assert "chat" in answer.json["error"]["message"]
        right = await rest(
            stack.gateway, "POST", "/openai/v1/completions", {"model": "normalizer", "prompt": "date: 3 Mar 2021"}
        )
        assert (right.status, right.json["choices"][0]["text"]) == (200, "2021-03-03")


async def test_every_wrong_request_is_refused_with_its_own_status_and_the_streams_beside_it_are_right(stack, beside):
    await asyncio.gather(
        *(refused_by_generate(stack.gateway, *case) for case in GENERATE.values()),
        *(refused_by_predictor(stack.gateway, *case) for case in PREDICTOR.values()),
        *(refused_by_rest(stack.gateway, *case) for case in REST.values()),
    )


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
