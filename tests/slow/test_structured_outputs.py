"""Answers of random JSON schemas are valid, at temperature 1 and with predictors killed underneath.

With FULL=1 2,000 schemas, otherwise 200; the longest tenth of the answers is repeated by slower predictors while these
are killed. An answer that fills the context ends with `length`: it is cut, and not counted as valid. Each test prints
its figures.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from random import Random

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.slow.random_schemas import random_schema
from tests.support.full import FULL
from tests.system.calls import channel

COUNT = 2000 if FULL else 200
DISTURBED = COUNT // 10
CALLERS = 32
KILL_EVERY_S = 2.0
SLOW_MS = 20
SLOW = {"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")}
SEED = int(os.environ.get("SCHEMA_SEED", "1"))
ANSWER_S = 120  # Nothing may hang.

pytestmark = pytest.mark.timeout(1200)


def stack_of(stacks, **settings):
    environment = {
        "predictor": {"PREDICTOR_DTYPE": "fp32", "SLOW_MS": str(SLOW_MS)},
        "transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": "120"},
    }
    return stacks.use(models="storyteller=models/storyteller", predictors=2, environment=environment, **settings)


async def answers(stack, schemas):
    """(ids, text, finish reason) of each schema, by its number."""
    places = asyncio.Semaphore(CALLERS)

    async def answer(stub, number, schema):
        request = headrace_pb2.GenerateRequest(
            model="storyteller",
            prompt="Once upon a time",
            temperature=1,
            seed=number,
            max_tokens=1000,
            structured_outputs=json.dumps({"json": schema}),
            request_id=f"schema {number}",
        )
        ids, text = [], ""
        async with places:
            async for response in stub.Generate(request, timeout=ANSWER_S):
                ids += response.token_ids
                text += response.text
        return ids, text, response.finish_reason

    async with channel(stack.gateway) as open_channel:
        stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
        found = await asyncio.gather(*(answer(stub, number, schema) for number, schema in schemas.items()))
    return dict(zip(schemas, found, strict=True))


@pytest_asyncio.fixture(scope="module")
async def undisturbed(stacks):
    random = Random(SEED)
    schemas = {number: random_schema(random) for number in range(COUNT)}
    async with stack_of(stacks) as stack:
        began = time.monotonic()
        found = await answers(stack, schemas)
    tokens = sum(len(ids) for ids, _, _ in found.values())
    print(f"{COUNT} schemas of seed {SEED}: {tokens} tokens in {time.monotonic() - began:.1f} s")
    return schemas, found


async def test_each_answer_that_ends_is_valid(undisturbed):
    schemas, found = undisturbed
    reasons = Counter(reason for _, _, reason in found.values())
    print(f"ended: {dict(reasons)}")
    invalid = []
    for number, (_, text, reason) in found.items():
        Draft202012Validator.check_schema(schemas[number])
        if reason == "stop":
            try:
                Draft202012Validator(schemas[number]).validate(json.loads(text))
            except Exception as error:
                invalid.append((number, schemas[number], text, str(error).splitlines()[0]))
    assert invalid == []
    assert reasons["stop"] >= 0.95 * COUNT


async def test_answers_are_the_same_with_predictors_killed_underneath(stacks, undisturbed):
    schemas, found = undisturbed
    numbers = sorted(schemas, key=lambda number: -len(found[number][0]))[:DISTURBED]
    async with stack_of(stacks, commands=SLOW) as stack:
        repeated = asyncio.create_task(answers(stack, {number: schemas[number] for number in numbers}))
        kills = 0
        while not repeated.done():
            await asyncio.wait([repeated], timeout=KILL_EVERY_S if kills else KILL_EVERY_S / 4)
            with suppress(ProcessLookupError):  # It is still being restarted.
                await stack.kill(f"predictor-{kills % 2}", signal.SIGKILL)
                kills += 1
        assert await repeated == {number: found[number] for number in numbers}
        resumes = await resumes_of(stack)
        print(f"{DISTURBED} answers, {kills} kills, {sum(resumes)} resumes of {sum(map(bool, resumes))} answers")
        assert sum(resumes)
        await stack.wait_ready(timeout_s=120)


async def resumes_of(stack):
    """How often each answer on record was resumed."""
    async with channel(stack.gateway) as open_channel:
        query = headrace_pb2.QueryPayloadsRequest(page_size=DISTURBED)
        log = headrace_pb2_grpc.PayloadLogStub(open_channel)
        return [record.resumes async for record in log.Query(query)]
