"""Models are loaded and unloaded through the gateway while others are served: gRPC clients of the predictor."""

import re
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.hub import serve_hub
from tests.prometheus import read_page
from tests.random_models import save_random_model
from tests.support.status import refusal
from tests.system.calls import channel, each, generate, ids_request, records, rest, text_of

ROOT = Path(__file__).parents[2]

ECHO = "async def execute(request):\n    return request.raw\n"


@pytest_asyncio.fixture(scope="module")
async def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    for name, code in {"echo": ECHO, "lab/echo": ECHO, "lab-echo": "1 / 0"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "model.py").write_text(code)
    save_random_model("llama", folder / "llama")
    return folder


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub():
    with serve_hub(dict.fromkeys(("good/story", "acme/tale"), ROOT / "models" / "storyteller")) as address:
        yield address


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, repository, hub, hub_folder):
    # Loads pass through the transformer, which fetches the tokenizer.
    from_hub = {"HF_ENDPOINT": hub, "HF_HOME": str(hub_folder)}
    settings = from_hub | {
        "PREDICTOR_MODEL_REPOSITORY": str(repository),
        "PREDICTOR_HUB_ALLOW": "good/*",
        "PREDICTOR_DRAIN_S": "1",
        "PREDICTOR_PAYLOAD_ADDRESSED": "true",
    }
    async with stacks.use(
        models="storyteller=models/storyteller,acme/tale@main",
        environment={"predictor": settings, "transformer": from_hub},
    ) as started:
        yield started


@pytest_asyncio.fixture
async def predictor(stack):
    async with channel(stack.gateway, "predictor") as open_channel:
        yield GRPCInferenceServiceStub(open_channel)


async def load(predictor, name, **parameters):
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        request.parameters[key].string_param = value
    await predictor.RepositoryModelLoad(request)


async def unload(predictor, name):
    await predictor.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name))


async def index(predictor):
    response = await predictor.RepositoryIndex(pb.RepositoryIndexRequest())
    return {row.name: (row.state, row.reason) for row in response.models}


async def status_of(call):
    raised = await refusal(call)
    return raised.code(), raised.details()


def ids(model, **parameters):
    return ids_request(model, Tensor("input_ids", "INT64", np.array([5, 6, 7])), **parameters)


async def test_a_model_that_generates_is_loaded_used_counted_and_unloaded(stack, predictor):
    assert (await index(predictor))["llama"][0] == "UNAVAILABLE"
    assert (await status_of(predictor.ModelInfer(ids("llama"))))[0] is grpc.StatusCode.NOT_FOUND
    await load(predictor, "llama")
    assert (await index(predictor))["llama"] == ("READY", "")
    answer = decode_outputs(await predictor.ModelInfer(ids("llama", max_tokens=4, ignore_eos=1)))
    assert answer["output_ids"].array.size == 4
    streamed = [r async for r in predictor.ModelStreamInfer(each(ids("llama", max_tokens=4, ignore_eos=1)))]
    assert (await status_of(predictor.ModelInfer(ids("llama", max_tokens=-1))))[0] is grpc.StatusCode.INVALID_ARGUMENT
    request = pb.ModelStatisticsRequest(name="llama", version="1")
    (model,) = (await predictor.ModelStatistics(request)).model_stats
    assert (model.inference_count, model.inference_stats.success.count, model.inference_stats.fail.count) == (2, 2, 1)
    assert model.response_stats["0"].success.count == 2
    assert model.response_stats["0"].fail.count == 1
    assert sum(tally.success.count for tally in model.response_stats.values()) == 1 + len(streamed)
    config = (await predictor.ModelConfig(pb.ModelConfigRequest(name="llama"))).config
    assert config.model_transaction_policy.decoupled
    assert config.parameters["source"].string_value.endswith("/llama")
    await unload(predictor, "llama")
    assert (await status_of(predictor.ModelInfer(ids("llama"))))[0] is grpc.StatusCode.NOT_FOUND
    assert (await status_of(predictor.ModelStatistics(request)))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_hub_model_is_fetched_at_the_start_with_only_its_safetensors_weights_and_served(stack, hub_folder):
    assert text_of(await generate(stack.gateway, model="acme/tale", prompt="Once upon a time", max_tokens=5))
    assert re.search(r"acme/tale: fetched [\d.]+ of 3\.\d MB", stack.log("predictor-0"))
    fetched = {path.name for path in hub_folder.rglob("snapshots/*/*")}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= fetched
    assert "README.md" not in fetched


@pytest.mark.parametrize(("name", "source"), [("good/story", ""), ("tale", "good/story@main")])
async def test_an_allowed_hub_model_is_loaded_by_its_id_or_another_name(predictor, name, source):
    await load(predictor, name, **({"source": source} if source else {}))
    answer = decode_outputs(await predictor.ModelInfer(ids(name, max_tokens=2, ignore_eos=1)))
    assert answer["output_ids"].array.size == 2
    config = (await predictor.ModelConfig(pb.ModelConfigRequest(name=name))).config
    assert config.parameters["source"].string_value == (source or name)
    await unload(predictor, name)


async def test_a_name_with_slashes_is_one_by_every_path(stack, predictor):
    known = await index(predictor)
    assert {name for name in known if "lab" in name} == {"lab/echo", "lab-echo"}
    for written in ("lab/echo", "lab%2Fecho"):
        assert (await rest(stack.gateway, "POST", f"/v2/repository/models/{written}/load", {})).json == {}
        body = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}]}
        answer = await rest(stack.gateway, "POST", f"/v2/models/{written}/versions/1/infer", body)
        assert (answer.json["model_name"], answer.json["outputs"][0]["data"]) == ("lab/echo", [7])
        assert (await rest(stack.gateway, "GET", f"/v2/models/{written}/ready")).json["name"] == "lab/echo"
        assert (await rest(stack.gateway, "POST", f"/v2/repository/models/{written}/unload", {})).json == {}
        for head in ("/v1/models", "/openai/v1/models"):
            assert (await rest(stack.gateway, "GET", f"{head}/{written.replace('lab', 'acme')}")).status == 404
            assert (await rest(stack.gateway, "GET", f"{head}/{written}")).status == 404
    for written in ("acme/tale", "acme%2ftale"):
        assert (await rest(stack.gateway, "GET", f"/v1/models/{written}")).json["object"] == "model"
        of_anthropic = await rest(stack.gateway, "GET", f"/v1/models/{written}", anthropic_version="2023-06-01")
        assert (of_anthropic.json["type"], of_anthropic.json["id"]) == ("model", "acme/tale")
    await generate(stack.gateway, model="acme/tale", prompt="Once", max_tokens=2, request_id="of-acme")
    (record,) = await records(stack.gateway, request_id="of-acme", model="acme/tale")
    assert (record.model, record.status) == ("acme/tale", "OK")
    for _, port, path in (page for pages in stack.metrics_pages.values() for page in pages):
        labels = [sample.labels for sample in read_page(port, path) if sample.name == "headrace_streams_total"]
        labels += [sample.labels for sample in read_page(port, path) if sample.name == "headrace_sequences_running"]
        assert not labels or "acme/tale" in {each["gen_ai_request_model"] for each in labels}


@pytest.mark.parametrize("name", ["acme/tale/", "acme", "acme/../acme/tale", "../secret", "acme/tale/infer", "a" * 300])
async def test_another_name_is_no_model(stack, predictor, name):
    written = name.replace("/", "%2F")
    for path, text in ((f"/v1/models/{written}", "message"), (f"/v2/models/{written}/ready", "no model")):
        answer = await rest(stack.gateway, "GET", path)
        assert (answer.status, answer.headers["x-failed-hop"]) == (404, "transformer")
        assert text in answer.body.decode()
    answer = await rest(stack.gateway, "POST", f"/v2/repository/models/{written}/load", {})
    assert (answer.status, answer.headers["x-failed-hop"]) == (404, "predictor")
    assert (await status_of(load(predictor, name)))[0] is grpc.StatusCode.NOT_FOUND


async def test_overrides_and_other_repositories_are_refused(predictor):
    status = await status_of(load(predictor, "echo", config="{}"))
    assert status[0] is grpc.StatusCode.INVALID_ARGUMENT
    request = pb.RepositoryModelLoadRequest(model_name="echo", repository_name="other")
    assert (await status_of(predictor.RepositoryModelLoad(request)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_direct_requests_of_the_predictor_are_recorded_if_configured(stack, predictor):
    request = ids("storyteller", max_tokens=2)
    request.id = "past-the-transformer"
    await predictor.ModelInfer(request)
    (record,) = await records(stack.gateway, request_id="past-the-transformer")
    assert (record.model, record.status, record.protocol) == (
        "storyteller",
        "OK",
        "inference.GRPCInferenceService/ModelInfer",
    )
    tensors = [(t.name, t.datatype, list(t.shape), t.size) for t in (*record.inputs, *record.outputs)]
    assert tensors[:2] == [("input_ids", "INT64", [3], 24), ("output_ids", "INT32", [2], 8)]
    assert not any(t.HasField("data") or t.digest for t in (*record.inputs, *record.outputs))


async def test_requests_that_the_transformer_records_are_recorded_once(stack, predictor):
    await generate(
        stack.gateway, model="storyteller", prompt="Once", max_tokens=2, request_id="through-the-transformer"
    )
    later = ids("storyteller", max_tokens=1)
    later.id = "later"
    await predictor.ModelInfer(later)
    # The predictor's later record has arrived, so its earlier ones have as well.
    await records(stack.gateway, request_id="later")
    (record,) = await records(stack.gateway, request_id="through-the-transformer")
    assert record.protocol == "headrace.v1.TextGeneration/Generate"
