"""Thousands of wrong requests: each is refused with its own status within five seconds, and affects no other call.

50 a protocol, 10,000 with FULL=1. The same FUZZ_SEED makes the same requests; FUZZ_CASE=protocol/number sends one
of them again and prints it.
"""

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fuzz import grpc_cases, json_cases
from tests.fuzz.case import Case, verdict
from tests.fuzz.sending import Sender
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.support.full import FULL
from tests.system.calls import channel, each, generate, rest, statistics, text_of, text_request
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("FUZZ_SEED", "1")
ONE_CASE = os.environ.get("FUZZ_CASE", "")
CASES = 10_000 if FULL else 50
AT_ONCE = 16
SHOWN = 20  # Printed failures of one protocol.

PROTOCOLS = {
    "gRPC Generate": grpc_cases.generate,
    "ModelInfer": grpc_cases.model_infer,
    "ModelStreamInfer": grpc_cases.model_stream_infer,
    "predictor": grpc_cases.predictor,
    "completions": json_cases.completions,
    "chat completions": json_cases.chat_completions,
    "embeddings": json_cases.embeddings,
    "V2 infer JSON": json_cases.infer_json,
    "V2 infer binary": json_cases.infer_binary,
    "generate": json_cases.generate,
    "generate_stream": json_cases.generate_stream,
    "headrace generate": json_cases.headrace_generate,
    "payload log": grpc_cases.payload_query,
    "gRPC-Web": grpc_cases.grpc_web,
    "repository": grpc_cases.repository,
}
DECLARED = """
INPUTS = {"x": ("FP32", [-1, 3])}
OUTPUTS = {"row": ("FP32", [3])}

async def execute(request):
    return {"row": request.inputs["x"].sum(0)}
"""

pytestmark = pytest.mark.timeout(1800 if FULL else 300)


def case_of(protocol: str, number: int) -> Case:
    return PROTOCOLS[protocol](Random(f"{SEED}/{protocol}/{number}"))


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "declared").mkdir()
    (folder / "declared" / "model.py").write_text(DECLARED)
    save_random_encoder("bert", folder / "embedder")
    save_words_tokenizer(folder / "embedder", "the", "fox")
    save_random_encoder("bert-classifier", folder / "classifier")
    own = ",".join(f"{name}={folder / name}" for name in ("declared", "embedder", "classifier"))
    bundled = ",".join(f"{name}=models/{name}" for name in ("storyteller", "normalizer", "identity"))
    async with stacks.use(models=f"{bundled},{own}") as started:
        yield started


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_wrong_requests_are_refused_and_affect_no_other_call(stack, protocol):
    processes = {name: stack.pid(name) for name in stack.names}
    numbers = iter(range(CASES))
    if ONE_CASE:
        of, _, number = ONE_CASE.rpartition("/")
        if of != protocol:
            pytest.skip(f"FUZZ_CASE={ONE_CASE} selects another protocol")
        numbers = iter([int(number)])
    failures, statuses, begun, slowest = [], Counter(), time.monotonic(), 0.0

    async with Sender(stack.gateway) as sender:

        async def work():
            nonlocal slowest
            for number in numbers:
                case = case_of(protocol, number)
                outcome = await sender.send(case)
                statuses[outcome.status] += 1
                slowest = max(slowest, outcome.seconds)
                if ONE_CASE:
                    print(case, outcome, sep="\n")
                if reason := verdict(case, outcome):
                    found = f"{outcome.status} {outcome.message[:160]!r}"
                    failures.append(f"{reason}: {protocol}/{number} [{case.what}] → {found}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    assert not failures, "\n".join(
        [
            f"{len(failures)} of {CASES}; FUZZ_SEED={SEED} FUZZ_CASE='{protocol}/NUMBER' sends one again",
            *failures[:SHOWN],
        ]
    )

    assert {name: stack.pid(name) for name in stack.names} == processes
    await good_calls_work(stack)
    await until(lambda: engine_is_idle(stack))
    rate = sum(statuses.values()) / (time.monotonic() - begun)
    print(f"{protocol}: {dict(sorted(statuses.items()))}, the slowest {slowest:.3f} s, {rate:.0f} cases a second")


async def good_calls_work(stack):
    """One right call on each protocol."""
    gateway, fields = stack.gateway, {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
    assert text_of(await generate(gateway, **fields))
    whole = await rest(gateway, "POST", "/v1/completions", fields)
    assert whole.json["choices"][0]["text"], whole.body
    messages = [{"role": "user", "content": "Hi"}]
    chat = await rest(gateway, "POST", "/v1/chat/completions", {"model": "storyteller", "messages": messages})
    assert chat.json["choices"][0]["message"]["content"], chat.body
    vectors = await rest(gateway, "POST", "/v1/embeddings", {"model": "embedder", "input": "the fox"})
    assert vectors.json["data"][0]["embedding"], vectors.body
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    row = await rest(gateway, "POST", "/v2/models/declared/infer", {"inputs": [tensor]})
    assert row.json["outputs"][0]["data"] == [1, 2, 3], row.body
    generate_fields = {"text_input": "Once", "max_tokens": 2}
    assert (await rest(gateway, "POST", "/v2/models/storyteller/generate", generate_fields)).json["text_output"]
    assert json.loads(
        (await rest(gateway, "POST", "/v2/models/storyteller/generate_stream", generate_fields)).events[-1]
    )["text_output"]
    lines = (await rest(gateway, "POST", "/headrace/v1/generate", fields)).body.splitlines()
    assert json.loads(lines[-1])["finish_reason"] == "length"
    assert (await rest(gateway, "GET", "/v2/health/ready")).status == 200
    async with channel(gateway) as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        request = text_request("storyteller", "Once", max_tokens=2)
        assert (await stub.ModelInfer(request)).outputs
        assert not any([answer.error_message async for answer in stub.ModelStreamInfer(each(request))])
        log = headrace_pb2_grpc.PayloadLogStub(open_channel)
        assert [record async for record in log.Query(headrace_pb2.QueryPayloadsRequest(page_size=1))]


async def engine_is_idle(stack):
    """Whether the engine is idle: the calls between the two checks take longer than a step."""
    predictor = stack.addresses["predictor-0"]
    for model in ("storyteller", "normalizer"):
        before = (await statistics(predictor, model)).execution_count
        for _ in range(20):
            after = (await statistics(predictor, model)).execution_count
        if after != before:
            return False
    return True


def test_a_case_depends_only_on_its_seed_and_number():
    for protocol in PROTOCOLS:
        for number in range(50):
            assert repr(case_of(protocol, number)) == repr(case_of(protocol, number))
