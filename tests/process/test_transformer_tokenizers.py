"""A model with an unreadable tokenizer affects no other, and a model of any name can take text."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from headrace.errors import StartupError
from headrace.models.sources import ModelSource, parse_location
from headrace_protos import inference_pb2 as pb
from headrace_protos import model_config_pb2
from headrace_transformer.text.model_text import read_text
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.status import refusal
from tests.support.transformer_fixtures import transformer

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"


def storyteller(folder, **contents):
    """A copy of the storyteller's text side; `contents` replaces files; None removes one."""
    folder.mkdir()
    for path in STORYTELLER.glob("*.json"):
        shutil.copy(path, folder)
    for name, text in contents.items():
        path = folder / f"{name}.json"
        path.unlink()
        if text is not None:
            path.write_text(text)
    return folder


UNREADABLE = {
    "no tokenizer": ({"tokenizer": None}, "no tokenizer in .*: it has none of tokenizer.json, vocab.txt"),
    "half a file": ({"tokenizer": '{"model": '}, r"tokenizer\.json cannot be read: ValueError: .*EOF while parsing"),
    "a wrong configuration": ({"tokenizer_config": "[]"}, r"tokenizer_config\.json has no JSON object"),
    "a configuration of the model that is none": ({"config": "[1]"}, r"/config\.json has no JSON object"),
}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("fault", UNREADABLE)
def test_unreadable_files_are_refused_in_one_line_with_the_reason(tmp_path, pool, fault):
    contents, reason = UNREADABLE[fault]
    folder = storyteller(tmp_path / "model", **contents)
    with pytest.raises(StartupError, match=reason) as raised:
        read_text(ModelSource("m", str(folder)), pool)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("model m: ")


class Repository(ForeignServer):
    """A predictor that loads generation models, each from the folder named like the last part of its name."""

    def __init__(self, folders):
        super().__init__(ready=())
        self.folders = folders

    async def RepositoryIndex(self, request, context):  # noqa: N802
        models = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(models=[models(name=name, state="READY") for name in sorted(self.ready)])

    async def RepositoryModelLoad(self, request, context):  # noqa: N802
        self.ready.add(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request, context):  # noqa: N802
        self.ready.discard(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def ModelMetadata(self, request, context):  # noqa: N802
        response = await super().ModelMetadata(request, context)
        response.inputs.add(name="input_ids", datatype="INT64", shape=[1, -1])
        response.outputs.add(name="output_ids", datatype="INT64", shape=[1, -1])
        return response

    async def ModelConfig(self, request, context):  # noqa: N802
        config = model_config_pb2.ModelConfig(name=request.name)
        config.parameters["source"].string_value = str(self.folders[request.name])
        return pb.ModelConfigResponse(config=config)


@pytest.fixture
async def served(tmp_path):
    """A transformer, and the predictor behind it."""
    bad = storyteller(tmp_path / "bad", tokenizer='{"model": {"type": "X"}}')
    bare = storyteller(tmp_path / "bare", tokenizer=None)
    server = Repository({"good/story": STORYTELLER, "story": STORYTELLER, "bad": bad, "bare": bare})
    server.ready.add("story")
    async with foreign_server(server) as address, transformer(address) as (stub, catalogue):
        yield stub, catalogue, server


@pytest.mark.parametrize("name", ["bad", "bare"])
async def test_a_model_whose_tokenizer_cannot_be_read_is_not_loaded_and_the_others_are_served(served, name):
    stub, _, server = served
    raised = await refusal(
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name)),
        f"model '{name}' was not loaded: model {name}: ",
    )
    assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.ready == {"story"}
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name=name))).ready
    assert stub.router.is_ready("story")
    await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="good/story"))


async def test_after_a_restart_a_model_with_an_unreadable_tokenizer_is_logged_and_the_others_are_served(tmp_path):
    bad = storyteller(tmp_path / "bad", tokenizer=json.dumps({"model": {"type": "X"}}))
    server = Repository({"story": STORYTELLER, "bad": bad})
    server.ready.update(("story", "bad"))
    async with foreign_server(server) as address, transformer(address) as (stub, catalogue):
        assert stub.router.is_ready("story")
        answer = await stub.ModelMetadata(pb.ModelMetadataRequest(name="story"))
        assert answer.platform == "headrace_text"
        assert "cannot be read" in catalogue.why_unreadable("bad")


async def test_a_folder_that_only_the_predictors_host_has_is_the_reason_why_a_model_takes_no_text(tmp_path):
    server = Repository({"story": STORYTELLER, "elsewhere": tmp_path / "data" / "elsewhere"})
    server.ready.update(("story", "elsewhere"))
    async with foreign_server(server) as address, transformer(address) as (stub, catalogue):
        assert stub.router.is_ready("story")
        reason = catalogue.why_unreadable("elsewhere")
    assert reason.startswith(f"'{tmp_path}/data/elsewhere' is not a folder; it is what the predictor reads: ")
    assert "MODELS here must name a folder" in reason


def test_a_location_is_a_folder_or_a_hub_id_for_any_name_of_the_model(tmp_path):
    assert parse_location("good/story", "good/story@main") == ModelSource("good/story", "good/story", "main")
    folder = tmp_path / "a,b=c"
    folder.mkdir()
    assert parse_location("good/story", str(folder)).is_local
