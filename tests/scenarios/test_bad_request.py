"""`bad_request`: a wrong call affects no other call, neither beside it nor after it.

While streams run on both text models, wrong requests of every protocol are refused, and so is one whose model step
fails; the streams get their whole answers, and the next right call works. A dead engine is
reported, its process is restarted, and its streams go on.
"""

import asyncio
import sys
from operator import not_

import grpc
import pytest
import pytest_asyncio

from tests.chaos.load import Client
from tests.chaos.oracle import Oracle
from tests.chaos.requests import Story, greedy
from tests.fuzz.case import verdict
from tests.fuzz.sending import Sender
from tests.fuzz.test_fuzz import PROTOCOLS, case_of
from tests.scenarios.crowd import Crowd, stories_of
from tests.support.status import refusal
from tests.system.calls import generate, serves, text_of
from tests.system.faulty_predictor import FAILS_LATER
from tests.waiting import until

CALLERS = 8
TOKENS = 60
DATES = [Story(prompt, (("temperature", 0.0),), "normalizer") for prompt in ("date: 3 Mar 2021", "date: 7 May 1999")]
STORIES = [*stories_of(TOKENS)[:: 16 // CALLERS], *DATES]  # Half of each kind.
CASES = 4  # Of each protocol.


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The FAULTS folder of tests.system.faulty_predictor."""
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, faults):
    async with stacks.use(
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
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


async def test_wrong_requests_are_refused_and_the_streams_beside_them_are_right(stack, beside):
    """Those of tests/fuzz/test_fuzz.py; the status of each fault is in tests/system/test_error_table.py."""
    async with Sender(stack.gateway) as sender:

        async def send(protocol, number):
            case = case_of(protocol, number)
            outcome = await sender.send(case)
            return case.what, outcome, verdict(case, outcome)

        sent = await asyncio.gather(*(send(protocol, number) for protocol in PROTOCOLS for number in range(CASES)))
    assert not [refusal for refusal in sent if refusal[-1]]


async def test_a_request_that_fails_in_the_model_fails_alone(stack, beside):
    for _ in range(4):
        raised = await refusal(
            generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=9, seed=FAILS_LATER, ignore_eos=True)
        )
        assert raised.code() is grpc.StatusCode.INTERNAL
        assert dict(raised.trailing_metadata())["x-failed-hop"] == "predictor"
        assert "secret" not in raised.details()


async def test_a_step_that_fails_once_affects_no_stream(stack, faults, beside):
    raising = faults / f"raise-{stack.addresses['predictor-0'].rpartition(':')[2]}"
    for _ in range(3):
        raising.touch()
        await until(lambda: not raising.exists())


async def test_a_dead_engine_is_reported_and_replaced_and_its_streams_go_on(stack, faults, beside):
    predictor, process = stack.addresses["predictor-0"], stack.pid("predictor-0")
    assert await serves(predictor, "ready")
    (faults / f"dead-{predictor.rpartition(':')[2]}").touch()
    await until(lambda: serves(predictor, "ready"), holds=not_)
    await until(lambda: "another engine serves it" in stack.log("predictor-0"))
    await stack.wait_ready()
    assert stack.pid("predictor-0") == process
    story = greedy("Once upon a time", 5)
    assert text_of(await generate(stack.gateway, model="storyteller", prompt=story.prompt, **story.parameters))
