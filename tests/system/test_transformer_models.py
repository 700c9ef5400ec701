"""Models are loaded and unloaded at the predictors, and callers see them at once: text, tensors and processors."""

import asyncio
import io
import json
import shutil

import grpc
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_runner.settings import ROOT
from tests.support.status import code_of
from tests.system.calls import channel, each, generate, text_of, text_request
from tests.waiting import until

EXAMPLE = "docs/image_labels"
NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "models" / "storyteller", repository / "teller")
    shutil.copytree(ROOT / "models" / "identity", repository / "echo")
    environment = {
        "predictor": {"PREDICTOR_MODEL_REPOSITORY": str(repository)},
        "transformer": {"TRANSFORMER_PROCESSORS": f"labels={EXAMPLE}/processor.py:ImageLabels"},
    }
    models = f"storyteller=models/storyteller,pixels={EXAMPLE}"
    async with stacks.use(models=models, predictors=2, environment=environment) as started:
        yield started


@pytest_asyncio.fixture
async def stub(stack):
    async with channel(stack.gateway) as open_channel:
        yield GRPCInferenceServiceStub(open_channel)


async def load(stub, name):
    await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))


async def unload(stub, name):
    await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name))


async def states(stub):
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
    return {entry.name: entry.state for entry in index.models}


async def ready(stub, name):
    return (await stub.ModelReady(pb.ModelReadyRequest(name=name))).ready


async def test_a_loaded_text_model_takes_text_at_once_and_is_gone_once_unloaded(stack, stub):
    assert await code_of(stub.ModelInfer(text_request("teller", "Once"))) is NOT_FOUND
    await load(stub, "teller")
    assert await ready(stub, "teller")
    assert (await states(stub))["teller"] == "READY"
    fields = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 5}
    own = text_of(await generate(stack.gateway, model="storyteller", **fields))
    answers = await asyncio.gather(*(generate(stack.gateway, model="teller", **fields) for _ in range(16)))
    assert {text_of(answer) for answer in answers} == {own}
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="teller"))
    assert metadata.inputs[0].name == "text_input"

    await unload(stub, "teller")
    assert not await ready(stub, "teller")
    assert await code_of(stub.ModelInfer(text_request("teller", "Once"))) is NOT_FOUND
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_a_model_that_is_loaded_at_a_predictor_appears(stack, stub):
    for name in ("predictor-0", "predictor-1"):
        async with channel(stack.addresses[name]) as open_channel:
            await load(GRPCInferenceServiceStub(open_channel), "echo")
    await until(lambda: ready(stub, "echo"))
    assert await stub.ModelInfer(pb.ModelInferRequest(model_name="echo"))
    async with channel(stack.addresses["predictor-1"]) as open_channel:
        await unload(GRPCInferenceServiceStub(open_channel), "echo")

    async def one_lacks_it():
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
        return "1 of 2 replicas lack it" in next(entry.reason for entry in index.models if entry.name == "echo")

    # One of two predictors has it, and answers every call, by each way.
    await until(one_lacks_it)
    assert await ready(stub, "echo")
    request = pb.ModelInferRequest(model_name="echo", id="1")
    add_input(request, Tensor("x", "FP32", np.arange(3, dtype=np.float32)))
    async with channel(stack.addresses["inner"]) as inner:
        for called in (stub, GRPCInferenceServiceStub(inner)):
            for _ in range(10):
                assert (await called.ModelInfer(request)).id == "1"
                assert (await called.ModelMetadata(pb.ModelMetadataRequest(name="echo"))).name == "echo"
                assert (await called.ModelConfig(pb.ModelConfigRequest(name="echo"))).config.name == "echo"
    # A stream's error is a message of it: only the transformer, which knows where the model is, chooses.
    for _ in range(10):
        answers = [answer async for answer in stub.ModelStreamInfer(iter([request]))]
        assert [answer.error_message for answer in answers] == [""]
    await unload(stub, "echo")
    assert await code_of(stub.ModelInfer(request)) is NOT_FOUND


def image(colour, size=(40, 30)):
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


def image_request(data):
    request = pb.ModelInferRequest(model_name="labels", id="r")
    add_input(request, bytes_tensor("image", [data]))
    return request


async def test_the_examples_processor_makes_a_label_of_an_image(stub):
    colour = "green"
    outputs = decode_outputs(await stub.ModelInfer(image_request(image(colour))))
    assert outputs["label"].array.tolist() == [colour.encode()]
    assert outputs["size"].array.tolist() == [40, 30]


async def test_a_processor_is_listed_beside_the_model_that_it_calls(stub):
    assert (await states(stub))["labels"] == "READY"
    request = pb.ModelInferRequest(model_name="pixels")
    add_input(request, Tensor("pixels", "FP32", np.zeros((2, 2, 3), dtype=np.float32)))
    assert decode_outputs(await stub.ModelInfer(request))["distances"].array.tolist() == [1, 1, 1]
    config = (await stub.ModelConfig(pb.ModelConfigRequest(name="labels"))).config
    assert config.parameters["model"].string_value == "pixels"


async def test_the_further_outputs_of_tritons_vllm_backend(stub):
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    request = text_request("storyteller", "Once upon a time", max_tokens=4, seed=1, ignore_eos=1)
    request.parameters["logprobs"].string_param = "2"
    for name in names:
        add_input(request, Tensor(f"return_{name}", "BOOL", np.array([True])))
    responses = [decode_outputs(r.infer_response) async for r in stub.ModelStreamInfer(each(request))]
    assert all(set(outputs) == {"text_output", *names} for outputs in responses)
    assert [r["finish_reason"].array[0] for r in responses] == [b"None"] * (len(responses) - 1) + [b"length"]
    assert {int(r["num_input_tokens"].array[0]) for r in responses} == {5}
    assert sum(int(r["num_output_tokens"].array[0]) for r in responses) == 4
    positions = [position for r in responses for position in json.loads(r["logprobs"].array[0])]
    assert len(positions) == 4
    assert all(sorted(entry["rank"] or 0 for entry in position.values())[-2:] == [1, 2] for position in positions)
    whole = decode_outputs(await stub.ModelInfer(request))
    assert whole["text_output"].array[0] == b"".join(r["text_output"].array[0] for r in responses)
    assert whole["cumulative_logprob"].array[0] == pytest.approx(responses[-1]["cumulative_logprob"].array[0])
    assert int(whole["num_output_tokens"].array[0]) == 4


async def test_outputs_may_be_named_without_their_flags(stub):
    """Triton's perf_analyzer names every output of the metadata, and sets no flag."""
    request = text_request("storyteller", "Once", max_tokens=2, ignore_eos=1)
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="storyteller"))
    for output in metadata.outputs:
        request.outputs.add(name=output.name)
    answered = {output.name for output in (await stub.ModelInfer(request)).outputs}
    assert answered == {output.name for output in metadata.outputs}
    add_input(request, Tensor("return_logprobs", "BOOL", np.array([False])))
    assert {output.name for output in (await stub.ModelInfer(request)).outputs} == answered - {"logprobs"}
    request.outputs.add(name="no_output")
    assert await code_of(stub.ModelInfer(request)) is INVALID


async def test_the_prompt_comes_first_if_it_is_not_excluded(stub):
    request = text_request("storyteller", "Once upon a time", max_tokens=4, seed=1)
    without = decode_outputs(await stub.ModelInfer(request))["text_output"].array[0]
    add_input(request, Tensor("exclude_input_in_output", "BOOL", np.array([False])))
    add_input(request, Tensor("stream", "BOOL", np.array([False])))
    (response,) = [r.infer_response async for r in stub.ModelStreamInfer(each(request))]
    assert decode_outputs(response)["text_output"].array[0] == b"Once upon a time" + without
    assert response.parameters["triton_final_response"].bool_param
