"""Contents of records: every way in and every outcome, tensors, and no more than the settings allow."""

import asyncio
import hashlib
import sys
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.oip.tensors import Tensor, add_input
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.status import refusal
from tests.system.calls import channel, each, generate, infer, records, rest
from tests.system.faulty_predictor import FAILS, FAILS_LATER, PYTHON_MODEL
from tests.system.request_outcome import Request
from tests.system.ways_in import RELAYED, STREAMS, TEXT

OPENAI, V2, OIP = "headrace.rest.v1.OpenAI", "headrace.rest.v1.OpenInference", "inference.GRPCInferenceService"
GENERATE = "headrace.v1.TextGeneration/Generate"
PROTOCOLS = {
    "Generate": GENERATE,
    "Generate by gRPC-Web": GENERATE,
    "Generate by REST": "headrace.rest.v1.TextGeneration/Generate",
    "ModelInfer": f"{OIP}/ModelInfer",
    "ModelStreamInfer": f"{OIP}/ModelStreamInfer",
    "ModelStreamInfer with statuses": f"{OIP}/ModelStreamInfer",
    "completions": f"{OPENAI}/Completions",
    "completions, events": f"{OPENAI}/Completions",
    "chat": f"{OPENAI}/ChatCompletions",
    "chat, events": f"{OPENAI}/ChatCompletions",
    "responses": "headrace.rest.v1.Responses/Create",
    "responses, events": "headrace.rest.v1.Responses/Create",
    "messages": "headrace.rest.v1.Anthropic/Messages",
    "messages, events": "headrace.rest.v1.Anthropic/Messages",
    "infer": f"{V2}/Infer",
    "infer, binary": f"{V2}/Infer",
    "generate": f"{V2}/Generate",
    "generate_stream": f"{V2}/GenerateStream",
}
# Two answers of a decoupled model: FP32, of one element and of two.
DECOUPLED_MODEL = """
import numpy as np


async def execute(request):
    for length in (1, 2):
        yield {"y": np.full(length, 7, np.float32)}
"""


def way_protocol(name):
    return PROTOCOLS[name.removesuffix(", relayed")]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory, faults):
    """A stack whose transformer keeps small tensors and one header, and whose predictor fails on request."""
    folder = tmp_path_factory.mktemp("models")
    for name, code in (("tensors", PYTHON_MODEL), ("many", DECOUPLED_MODEL)):
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(code)
    async with stacks.use(
        models=f"storyteller=models/storyteller,tensors={folder / 'tensors'},many={folder / 'many'}",
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={
            "predictor": {"FAULTS": str(faults)},
            "transformer": {
                "TRANSFORMER_PAYLOAD_METADATA": "x-user",
                "TRANSFORMER_PAYLOAD_TENSOR_BYTES": "64",
                "TRANSFORMER_PAYLOAD_TENSOR_DIGEST": "sha256",
            },
        },
    ) as started:
        yield started


def now():
    stamp = Timestamp()
    stamp.GetCurrentTime()
    return stamp


# ---------------------------------------------------------------- ways in and outcomes

OK, PARAMETERS = "OK", {"max_tokens": 2, "ignore_eos": True}
# Outcome → parameters, model, and the record's status and hops of text and of relayed tensors.
OUTCOMES = {
    "answered": (PARAMETERS, "storyteller", OK, ("", "")),
    "refused": (PARAMETERS | {"temperature": -1.0}, "storyteller", "INVALID_ARGUMENT", ("transformer", "predictor")),
    "unknown model": (PARAMETERS, "nobody", "NOT_FOUND", ("transformer", "transformer")),
    "failed": (PARAMETERS | {"seed": FAILS}, "storyteller", "INTERNAL", ("predictor", "predictor")),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_every_way_in_leaves_one_record_of_each_outcome(stack, outcome):
    parameters, model, status, hops = OUTCOMES[outcome]
    since = now()
    request = Request(model=model, parameters=parameters, goes_on=False)
    ways = TEXT | RELAYED
    await asyncio.gather(*(way_in(stack.gateway, request) for way_in in ways.values()))
    found = await records(stack.gateway, len(ways), since=since)
    statuses = Counter((record.protocol, record.status, record.failed_hop) for record in found)
    assert statuses == Counter((way_protocol(name), status, hops[name in RELAYED]) for name in ways)
    assert all(record.span_id and record.trace_id and record.call_id and record.duration_ms > 0 for record in found)
    assert all(bool(record.message) == (status != OK) for record in found)
    if outcome == "refused":
        of_text = [record for record in found if record.failed_hop == "transformer"]
        assert all(record.HasField("engine_ms") and record.engine_ms == 0 for record in of_text)


async def test_a_passed_deadline_is_recorded_on_every_way_in(stack, faults):
    since = now()
    (faults / "hold").touch()
    try:
        request = Request(timeout_s=0.5, goes_on=False)
        ways = TEXT | RELAYED
        await asyncio.gather(*(way_in(stack.gateway, request) for way_in in ways.values()))
    finally:
        (faults / "hold").unlink()
    found = await records(stack.gateway, len(ways), since=since)
    assert Counter((record.protocol, record.status) for record in found) == Counter(
        (way_protocol(name), "DEADLINE_EXCEEDED") for name in ways
    )


async def test_a_broken_answer_is_recorded_up_to_the_break(stack):
    since, names = now(), [name for name in STREAMS if name in TEXT]
    request = Request(parameters={"max_tokens": 20, "ignore_eos": True, "seed": FAILS_LATER}, goes_on=False)
    outcomes = await asyncio.gather(*(TEXT[name](stack.gateway, request) for name in names))
    assert all(outcome.begun for outcome in outcomes)
    found = await records(stack.gateway, len(names), since=since)
    ends = Counter((record.protocol, record.status, record.failed_hop) for record in found)
    assert ends == Counter((way_protocol(name), "INTERNAL", "predictor") for name in names)
    for record in found:
        assert record.chunks
        assert record.text == "".join(chunk.text for chunk in record.chunks)
        assert not record.finish_reason


async def test_a_too_long_request_id_is_refused_and_recorded(stack):
    await refusal(generate(stack.gateway, model="storyteller", prompt="Once", request_id="x" * 300), "at most 256")
    (record,) = await records(stack.gateway, request_id="x" * 256)
    assert (record.status, record.failed_hop) == ("INVALID_ARGUMENT", "transformer")


# ---------------------------------------------------------------- contents


async def test_log_probabilities_are_recorded_if_they_were_requested(stack):
    fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    responses = await generate(stack.gateway, **fields, logprobs=True, request_id="with")
    await generate(stack.gateway, **fields, request_id="without")
    (given,) = await records(stack.gateway, request_id="with")
    (bare,) = await records(stack.gateway, request_id="without")
    chunks = [(list(chunk.token_ids), list(chunk.logprobs)) for chunk in given.chunks]
    assert chunks == [(list(response.token_ids), list(response.logprobs)) for response in responses]
    assert [len(ids) for ids, logprobs in chunks] == [len(logprobs) for ids, logprobs in chunks]
    assert not any(chunk.logprobs for chunk in bare.chunks)


async def test_a_record_has_the_allowed_metadata_of_its_caller(stack):
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
    headers = {"x_user": "Ann", "x_other": "hidden", "authorization": "Bearer key", "x_request_id": "by-header"}
    await rest(stack.gateway, "POST", "/v1/completions", body, **headers)
    (record,) = await records(stack.gateway, request_id="by-header")
    assert dict(record.metadata) == {"x-user": "Ann"}
    assert b"hidden" not in record.SerializeToString()
    assert b"Bearer" not in record.SerializeToString()


async def test_tensors_are_recorded_by_shape_and_digest_and_small_ones_with_their_contents(stack):
    small, large = np.arange(8, dtype=np.int64), np.arange(200, dtype=np.float32).reshape(10, 20)
    request = pb.ModelInferRequest(model_name="tensors", id="tensors")
    add_input(request, Tensor("small", "INT64", small))
    add_input(request, Tensor("large", "FP32", large))
    await infer(stack.gateway, request)
    (record,) = await records(stack.gateway, request_id="tensors")
    expected = [
        ("small", "INT64", [8], f"sha256:{hashlib.sha256(small.tobytes()).hexdigest()}", small.tobytes()),
        ("large", "FP32", [10, 20], f"sha256:{hashlib.sha256(large.tobytes()).hexdigest()}", b""),
    ]
    for tensors in (record.inputs, record.outputs):  # The model returns its inputs.
        assert [(t.name, t.datatype, list(t.shape), t.digest, t.data) for t in tensors] == expected


async def test_each_answer_of_a_decoupled_model_is_a_chunk_of_its_record(stack):
    request = pb.ModelInferRequest(model_name="many", id="many")
    add_input(request, Tensor("x", "INT32", np.zeros(1, np.int32)))
    async with channel(stack.gateway) as open_channel:
        call = GRPCInferenceServiceStub(open_channel).ModelStreamInfer(each(request))
        answers = [response.infer_response async for response in call]
    (record,) = await records(stack.gateway, request_id="many")
    shapes = [[list(output.shape) for output in answer.outputs] for answer in answers]
    assert [[list(output.shape) for output in chunk.outputs] for chunk in record.chunks] == shapes
    assert [shape for of_chunk in shapes for shape in of_chunk] == [[1], [2]]
    offsets = [chunk.offset_ms for chunk in record.chunks]
    assert offsets == sorted(offsets)
    assert offsets[0] > 0


# ---------------------------------------------------------------- modes and redaction
