"""The engine over a stand-in for vLLM's LLMEngine: tokens in order, vLLM ahead of the readers, forms of answers,
isolation, death.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from headrace.errors import HopBrokenError, InvalidRequestError, RequestFailedError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.interface import EngineDeadError, EngineLimits
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.vllm_engine.computer import VllmComputer
from headrace_predictor.vllm_engine.loading import WholePrompts
from tests.model.fakes import read_all
from tests.support.requests import submission
from tests.waiting import until

PROMPT = [5, 6, 7]
FOLDER = Path("models/storyteller")
STORIES = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
END = 2  # Its end token.


def token_after(ids, seed):
    return (sum(ids) * 31 + len(ids) + (seed or 0)) % 61 + 3


class StandIn:
    """Generates `burst` tokens of each request in a step: of `script`, or such as depend on all ids and the seed."""

    def __init__(self, burst=1):
        self.burst = burst
        self.requests = {}
        self.together = []  # How many requests each step had.
        self.added = self.aborted = 0
        self.error = None
        self.script = None
        self.prompts = []

    def add_request(self, number, prompt, sampling):
        if sampling["presence_penalty"] > 2:
            raise ValueError("presence_penalty must be in [-2, 2]")
        self.added += 1
        self.prompts.append(list(prompt))
        self.requests[number] = SimpleNamespace(ids=list(prompt), left=sampling["max_tokens"], sampling=sampling)

    def abort_request(self, numbers):
        for number in numbers:
            self.aborted += 1
            del self.requests[number]

    def step(self):
        if self.error is not None:
            raise self.error
        time.sleep(0.002)
        self.together.append(len(self.requests))
        return [self.generated(number) for number in list(self.requests)]

    def generated(self, number):
        request = self.requests[number]
        ids = []
        while len(ids) < self.burst and request.left:
            if self.script is None:
                ids.append(token_after(request.ids, request.sampling["seed"]))
            else:
                ids.append(self.script[len(request.ids) - len(PROMPT)])
            request.ids.append(ids[-1])
            request.left -= 1
        if not request.left:
            del self.requests[number]
        completion = SimpleNamespace(token_ids=ids, logprobs=None, finish_reason=None if request.left else "length")
        return SimpleNamespace(
            request_id=number,
            outputs=[completion],
            finished=not request.left,
            prompt_logprobs=None,
            num_cached_tokens=0,
        )


def expected(count, seed=None, ids=PROMPT):
    ids = list(ids)
    for _ in range(count):
        ids.append(token_after(ids, seed))
    return ids[len(PROMPT) :]


@pytest.fixture
def start():
    engines = []

    def start(burst=1, max_running=2):
        llm = StandIn(burst)
        computer = VllmComputer(llm, dict, lambda ids, cache_salt: ids, frozenset({END}), "vllm", END)
        scheduler = Scheduler(BlockManager(500, 4), max_running, 8, 1 << 30, reuses_prefixes=False)
        limits, grammars = EngineLimits(1000, False, 1536, True), GrammarCompiler(FOLDER)
        pace = WholePrompts()
        engines.append(ContinuousBatchingEngine("m", computer, scheduler, pace, limits, {END}, 30, grammars=grammars))
        return engines[-1], llm

    yield start
    for engine in engines:
        engine.close()


def request(tokens=12, output_ids=(), alone=False, client="", **sampling):
    parameters = SamplingParameters(**{"max_tokens": tokens, "temperature": 0.0, **sampling})
    return submission("r", PROMPT, parameters, list(output_ids), alone=alone, client=client)


@pytest.mark.parametrize("burst", [1, 3, 50])
async def test_all_tokens_come_in_order_however_many_a_step_has(start, burst):
    engine, _ = start(burst)
    answers = await asyncio.gather(*(read_all(engine.submit(request(tokens))) for tokens in (12, 7, 1, 30)))
    assert [ids for ids, _ in answers] == [expected(tokens) for tokens in (12, 7, 1, 30)]
    assert all(chunks[-1].finish_reason == "length" for _, chunks in answers)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}], ids=["continued", "repeated"])
async def test_a_moved_answer_has_the_rest_of_its_tokens(start, sampling):
    engine, llm = start(burst=2)
    whole = expected(12, sampling.get("seed"))
    ids, chunks = await read_all(engine.submit(request(output_ids=whole[:5], **sampling)))
    assert ids == whole[5:]
    assert chunks[-1].usage.completion_tokens == 12
    assert llm.added == 1


async def test_an_answer_that_is_not_repeated_fails_alone(start):
    engine, llm = start()
    beside = asyncio.create_task(read_all(engine.submit(request(60))))
    with pytest.raises(RequestFailedError, match="does not repeat"):
        await read_all(engine.submit(request(output_ids=[1, 1], temperature=1.0, seed=4)))
    assert (await beside)[0] == expected(60)
    await until(lambda: not llm.requests)


async def test_a_refusal_of_vllm_is_the_requests_error(start):
    engine, _ = start()
    with pytest.raises(InvalidRequestError, match="vLLM refuses the request: presence_penalty"):
        await read_all(engine.submit(request(presence_penalty=3.0)))
    assert (await read_all(engine.submit(request())))[0] == expected(12)


def tokens_of(text):
    return [STORIES.token_to_id(letter) for letter in text]


@pytest.mark.parametrize("burst", [1, 50])
@pytest.mark.parametrize(
    ("form", "given", "script", "ids", "reason"),
    [
        ({"regex": "[ab]{3}"}, {}, [*tokens_of("aba"), END, 9, 9], tokens_of("aba"), "stop"),
        ({"regex": "[ab]+"}, {}, [*tokens_of("ab"), END, 9], [*tokens_of("ab"), END], "stop"),
        ({"regex": "[ab]+"}, {"ignore_eos": True}, [*tokens_of("ab"), END, 9], tokens_of("ab"), "stop"),
        ({"regex": "[ab]+"}, {"tokens": 4}, tokens_of("abab"), tokens_of("abab"), "length"),
    ],
    ids=["complete", "end token", "end token ignored", "length"],
)
async def test_an_answer_ends_where_its_form_does(start, burst, form, given, script, ids, reason):
    engine, llm = start(burst)
    llm.script = script + [9] * 20
    generated, chunks = await read_all(engine.submit(request(structured_outputs=form, **given)))
    assert (generated, chunks[-1].finish_reason) == (ids, reason)
    assert (engine.statistics.succeeded, engine.load.running) == (1, 0)


@pytest.mark.parametrize(
    ("given", "script", "message"),
    [
        ({}, [*tokens_of("a"), END], "too complex for vLLM"),
        ({}, tokens_of("ac"), "too complex for vLLM"),
        ({"allowed_token_ids": tokens_of("a")}, tokens_of("ab"), "leave no token at this point"),
    ],
    ids=["end token", "other token", "restriction"],
)
async def test_a_token_that_a_form_does_not_allow_is_the_requests_error(start, given, script, message):
    engine, llm = start()
    llm.script = script + [9] * 20
    with pytest.raises(InvalidRequestError, match=message):
        await read_all(engine.submit(request(structured_outputs={"regex": "[ab]{3}"}, **given)))
    await until(lambda: engine.statistics.failed == 1)
    llm.script = None
    assert (await read_all(engine.submit(request())))[0] == expected(12)


async def test_a_moved_answer_with_a_form_is_repeated(start):
    engine, llm = start()
    llm.script = [*tokens_of("aabb"), END]
    ids, _ = await read_all(engine.submit(request(output_ids=tokens_of("aa"), structured_outputs={"regex": "a+b+"})))
    assert (ids, llm.prompts) == ([*tokens_of("bb"), END], [PROMPT])


async def test_a_pace_holds_tokens_back_that_vllm_has_already(start):
    engine, llm = start(burst=50)
    begun = time.monotonic()
    ids, chunks = await read_all(engine.submit(request(6, pace=20)))
    assert time.monotonic() - begun >= 5 / 20
    assert (ids, len(chunks), len(llm.together)) == (expected(6), 6, 1)


async def test_an_isolated_request_is_alone_in_vllm_and_the_others_return(start):
    engine, llm = start()
    beside = asyncio.create_task(read_all(engine.submit(request(300, temperature=1.0, seed=9))))
    await until(lambda: len(llm.together) > 3)
    ids, _ = await read_all(engine.submit(request(3, alone=True)))
    assert ids == expected(3)
    assert (await beside)[0] == expected(300, 9)
    assert (llm.added, llm.aborted) == (3, 1)


async def test_a_client_gives_way_and_its_answer_is_the_same(start):
    engine, _ = start()
    slots = [engine.submit(request(300, temperature=1.0, seed=seed, client="many")) for seed in (1, 2)]
    reading = [asyncio.create_task(read_all(slot)) for slot in slots]
    await until(lambda: engine.load.running == 2)
    assert (await read_all(engine.submit(request(4, client="one"))))[0] == expected(4)
    assert [ids for ids, _ in await asyncio.gather(*reading)] == [expected(300, 1), expected(300, 2)]
    assert sum(slot.timeline.preemptions for slot in slots) == 1


async def test_a_cancelled_request_leaves_vllm_before_its_next_step(start):
    engine, llm = start()
    slot = engine.submit(request(900))
    await slot.read()
    slot.cancel()
    await until(lambda: engine.statistics.cancelled == 1)
    await read_all(engine.submit(request(3)))
    assert (llm.aborted, llm.together[-1]) == (1, 1)


async def test_an_error_of_a_step_is_the_engines_death(start):
    engine, llm = start()
    slot = engine.submit(request(900))
    await slot.read()
    llm.error = RuntimeError("a device failed")
    with pytest.raises(HopBrokenError):
        await read_all(slot)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(engine.died(), 10)
