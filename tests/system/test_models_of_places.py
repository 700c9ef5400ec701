"""A registry from end to end: a download that is cut, loads and unloads at run time."""

import base64
import json

import grpc
import pytest
import pytest_asyncio

from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.random_models import ROOT
from tests.support.registry import LAYER, PASSWORD, USER, Pushed, archive, serve_registry
from tests.support.status import code_of
from tests.system.calls import channel, generate, text_of

STORYTELLER = ROOT / "models" / "storyteller"
FILES = {path.name: path.read_bytes() for path in STORYTELLER.iterdir() if path.is_file()}
REPOSITORY = "models/story"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def registry():
    pushed = Pushed()
    pushed.push("car", (LAYER, archive({f"models/{name}": data for name, data in FILES.items()}), ""))
    with serve_registry(pushed, REPOSITORY) as registry:
        registry.cut_after = max(map(len, pushed.blobs.values())) // 2
        yield registry


def source(registry):
    return f"oci://{registry.address}/{REPOSITORY}:car"


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, registry, tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {registry.address: entry}}))
    places = {"XDG_CACHE_HOME": str(folder), "DOCKER_CONFIG": str(folder)}
    allowed = {"PREDICTOR_HUB_ALLOW": source(registry), "PREDICTOR_DRAIN_S": "1"}
    async with stacks.use(
        models="storyteller=models/storyteller", environment={"predictor": places | allowed, "transformer": places}
    ) as started:
        yield started


async def manage(stack, method, request):
    async with channel(stack.gateway, "predictor") as opened:
        await getattr(GRPCInferenceServiceStub(opened), f"RepositoryModel{method}")(request)


async def test_a_model_is_loaded_used_unloaded_and_loaded_again_while_others_are_served(stack, registry):
    expected = text_of(await generate(stack.gateway, model="storyteller", **PROMPT))
    load = pb.RepositoryModelLoadRequest(model_name="car")
    load.parameters["source"].string_param = source(registry)
    for _ in range(2):
        await manage(stack, "Load", load)
        assert text_of(await generate(stack.gateway, model="car", **PROMPT)) == expected
        await manage(stack, "Unload", pb.RepositoryModelUnloadRequest(model_name="car"))
        assert await code_of(generate(stack.gateway, model="car", **PROMPT)) is grpc.StatusCode.NOT_FOUND
    assert "fetched" in stack.log("predictor-0")
    assert registry.cut_after == 0
    assert any(registry.ranges)  # The rest was asked for, not all of it.
