"""A bucket and a registry from end to end: a download that is cut, loads and unloads at run time, a restart."""

import base64
import json
from urllib.request import Request, urlopen

import grpc
import pytest
import pytest_asyncio

from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.random_models import ROOT
from tests.support.registry import LAYER, PASSWORD, USER, Pushed, archive, serve_registry
from tests.system.calls import channel, generate, text_of

pytest.importorskip("s3fs", reason="needs the extra `buckets`")
STORYTELLER = ROOT / "models" / "storyteller"
FILES = {path.name: path.read_bytes() for path in STORYTELLER.iterdir() if path.is_file()}
REPOSITORY = "models/story"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def bucket():
    """S3's address, and that of a model there."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    signed = {"Authorization": "AWS ann:x", "Content-Type": "application/octet-stream"}
    for path, data in [("", b""), *((f"/story/{name}", data) for name, data in FILES.items())]:
        urlopen(Request(f"{address}/models{path}", data, signed, method="PUT"), timeout=20).close()
    yield address, "s3://models/story"
    server.stop()


@pytest.fixture(scope="module")
def registry():
    pushed = Pushed()
    pushed.push("car", (LAYER, archive({f"models/{name}": data for name, data in FILES.items()}), ""))
    with serve_registry(pushed, REPOSITORY) as registry:
        registry.cut_after = max(map(len, pushed.blobs.values())) // 2
        yield registry


@pytest.fixture(scope="module")
def sources(bucket, registry):
    return {"s3": bucket[1], "oci": f"oci://{registry.address}/{REPOSITORY}:car"}


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, bucket, registry, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {registry.address: entry}}))
    places = {
        "XDG_CACHE_HOME": str(folder),
        "DOCKER_CONFIG": str(folder),
        "AWS_ENDPOINT_URL": bucket[0],
        "AWS_ACCESS_KEY_ID": "ann",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    allowed = {"PREDICTOR_HUB_ALLOW": ",".join(sources.values()), "PREDICTOR_DRAIN_S": "1"}
    async with stacks.use(
        models="storyteller=models/storyteller", environment={"predictor": places | allowed, "transformer": places}
    ) as started:
        yield started


async def manage(stack, method, request):
    async with channel(stack.gateway, "predictor") as opened:
        await getattr(GRPCInferenceServiceStub(opened), f"RepositoryModel{method}")(request, timeout=60)


@pytest.mark.parametrize("place", ["s3", "oci"])
async def test_a_model_is_loaded_used_unloaded_and_loaded_again_while_others_are_served(
    stack, sources, registry, place
):
    expected = text_of(await generate(stack.gateway, model="storyteller", **PROMPT))
    load = pb.RepositoryModelLoadRequest(model_name=place)
    load.parameters["source"].string_param = sources[place]
    for _ in range(2):
        await manage(stack, "Load", load)
        assert text_of(await generate(stack.gateway, model=place, **PROMPT)) == expected
        await manage(stack, "Unload", pb.RepositoryModelUnloadRequest(model_name=place))
        with pytest.raises(grpc.aio.AioRpcError) as unloaded:
            await generate(stack.gateway, model=place, **PROMPT)
        assert unloaded.value.code() is grpc.StatusCode.NOT_FOUND
    assert "fetched" in stack.log("predictor-0")
    if place == "oci":
        assert registry.cut_after == 0
        assert any(registry.ranges)  # The rest was asked for, not all of it.
