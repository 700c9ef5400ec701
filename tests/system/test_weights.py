"""Replicas with different weights, as during a rolling update: no answer mixes two models, and none fails."""

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.weights import copy_with_other_weights
from tests.system.calls import channel, rest
from tests.waiting import until

TOKENS, STREAMS = 40, 12
SLOW = (sys.executable, "-m", "tests.system.slow_predictor")
OLD = "storyteller=models/storyteller"


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    """Three predictors, the second of which has been updated."""
    folder = tmp_path_factory.mktemp("weights")
    updated = copy_with_other_weights(Path("models/storyteller"), folder / "updated")
    environment = {
        "predictor": {"SLOW_MS": "40", "PREDICTOR_DTYPE": "fp32", "PREDICTOR_DRAIN_S": "60"},
        "predictor-1": {"MODELS": f"storyteller={updated}"},
    }
    commands = {"predictor": SLOW}
    async with stacks.use(models=OLD, predictors=3, commands=commands, environment=environment) as started:
        yield started


async def generated(stack, name="", came=None):
    """The ids of an answer to the prompt."""
    request = headrace_pb2.GenerateRequest(
        model="storyteller", prompt="Once upon a time", max_tokens=TOKENS, ignore_eos=True, seed=3, request_id=name
    )
    ids = []
    async with channel(stack.gateway) as open_channel:
        async for response in headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=120):
            ids += response.token_ids
            if came is not None:
                came[name] += 1
    return tuple(ids)


async def disturbed(stack, prefix, disturb):
    """The answers of many streams, of which some lose their predictor."""
    came = Counter()
    names = [f"{prefix} {number}" for number in range(STREAMS)]
    asking = [asyncio.create_task(generated(stack, name, came)) for name in names]
    await until(lambda: len(came) == STREAMS and min(came.values()) >= 5, 60)
    assert not any(task.done() for task in asking)
    await disturb()
    return dict(zip(names, await asyncio.gather(*asking), strict=True))


async def records_of(stack, answers):
    """The records of these requests, once they are stored."""
    found = {}

    async def are_there():
        async with channel(stack.gateway) as open_channel:
            query = headrace_pb2.QueryPayloadsRequest(page_size=500)
            async for record in headrace_pb2_grpc.PayloadLogStub(open_channel).Query(query):
                found[record.request_id] = record
        return answers.keys() <= found.keys()

    await until(are_there)
    return [found[name] for name in answers]


async def fingerprint_of(target):
    async with channel(target) as open_channel:
        request = pb.ModelConfigRequest(name="storyteller")
        answer = await GRPCInferenceServiceStub(open_channel).ModelConfig(request)
    return answer.config.parameters["fingerprint"].string_value


@pytest.mark.full  # The short form: tests/process/test_transformer_resume.py, with fingerprints.
async def test_a_stream_continues_only_with_the_weights_that_began_it(stack):
    old, new, same = [await fingerprint_of(f"127.0.0.1:{port}") for port in stack.settings.predictor_ports]
    assert old == same != new
    # The undisturbed answers of the two models, which must differ.
    undisturbed = set(await asyncio.gather(*(generated(stack) for _ in range(STREAMS))))
    assert len(undisturbed) == 2

    killed = await disturbed(stack, "killed", lambda: stack.kill("predictor-0", signal.SIGKILL))
    assert set(killed.values()) == undisturbed
    records = await records_of(stack, killed)
    assert any(record.resumes for record in records)
    by_fingerprint = {record.fingerprint: killed[record.request_id] for record in records}
    assert by_fingerprint.keys() == {old, new}
    assert all(killed[record.request_id] == by_fingerprint[record.fingerprint] for record in records)

    # Both predictors with the old weights at once: a stream that no other one can take ends there.
    await stack.wait_ready(timeout_s=60)

    async def drain():
        await asyncio.gather(*(stack.kill(name, signal.SIGTERM) for name in ("predictor-0", "predictor-2")))

    drained = await disturbed(stack, "drained", drain)
    assert set(drained.values()) <= undisturbed
    assert {record.status for record in await records_of(stack, drained)} == {"OK"}

    card = (await rest(stack.gateway, "GET", "/v1/models")).json["data"][0]
    assert card["fingerprint"] in {old, new}
