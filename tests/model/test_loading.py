"""A model that cannot be served is refused when it is loaded, in one line with advice."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from headrace.errors import StartupError
from headrace.models.sources import ModelSource
from headrace_predictor.models.weights import choose_device, load_weights
from headrace_predictor.repository.loading import build, fetch_model
from headrace_predictor.settings import PredictorSettings
from tests.hub import GATED, serve_hub

MODELS = Path(__file__).parents[2] / "models"
STORYTELLER = MODELS / "storyteller"


async def load(source, settings, host):
    fetched = fetch_model(source, lambda _: None)
    return await build(source, fetched, settings, host, lambda _: None)


async def refusal(host, location, **settings):
    """The error message for the model "x" from `location` with these settings."""
    settings = {"device": "cpu", **settings}
    with pytest.raises(StartupError) as refused:
        await load(ModelSource("x", str(location)), PredictorSettings(**settings), host)
    text = str(refused.value)
    assert text.startswith("model x")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_cache_memory": "100KiB", "max_context": 512}, "context 512 needs 0.0017 GB, have 0.0001"),
        ({"max_context": 5000}, "PREDICTOR_MAX_CONTEXT=5000, but its context is 1024"),
    ],
)
async def test_a_context_beyond_the_model_or_the_memory_is_refused(settings, text, engine_host):
    assert text in await refusal(engine_host, STORYTELLER, **settings)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "is a pointer of git-lfs"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1", "is a pointer of git-lfs"),
        ("model.safetensors", b"PK\x03\x04" * 400, "is not a safetensors file, or is cut off"),
        ("model.safetensors", b"\2" + bytes(7) + b"[]", "is not a safetensors file, or is cut off"),
        ("generation_config.json", b"{", "cannot be read: Expecting property name"),
        ("config.json", b"[]", "has no JSON object"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2.safetensors"}}', "lacks model-2.safetensors"),
    ],
)
def test_damaged_files_are_refused_by_name_before_torch_is_needed(tmp_path, name, content, reason):
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match="model x cannot be loaded: ") as refused:
        fetch_model(ModelSource("x", str(tmp_path)), lambda _: None)
    assert reason in str(refused.value)
    assert (name if "lacks" not in reason else str(tmp_path)) in str(refused.value)


def test_weights_that_are_cut_off_are_refused(tmp_path):
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(StartupError, match="has 100000 bytes, by its header "):
        fetch_model(ModelSource("x", str(tmp_path)), lambda _: None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 9000}, "do not fit: model.embed_tokens.weight is [1536, 192], config.json makes it"),
        ({"num_hidden_layers": 20}, "lacks model.layers.10.input_layernorm.weight"),
        ({"architectures": ["OPTForQuestionAnswering"]}, "OPTForQuestionAnswering is not served"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "WhisperForConditionalGeneration is not an archit"),
        ({"model_type": "nothing_like_it"}, "nothing_like_it"),
    ],
)
async def test_weights_and_classes_that_do_not_fit_are_refused_by_name(tmp_path, changes, reason, engine_host):
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert reason in await refusal(engine_host, tmp_path)


async def test_a_folder_without_a_model_is_refused(tmp_path, engine_host):
    assert "has no config.json" in await refusal(engine_host, tmp_path)


async def test_a_model_py_that_cannot_be_imported_is_refused(tmp_path, engine_host):
    (tmp_path / "model.py").write_text("import numpy\nimport nothing_like_it\n")
    assert "model.py, line 2 cannot be imported: ModuleNotFoundError: No module named" in await refusal(
        engine_host, tmp_path
    )


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (GATED, "somebody/gated is gated: accept its licence on the hub and set HF_TOKEN"),
        ("somebody/nothing", "somebody/nothing is neither a folder nor on the hub"),
    ],
)
async def test_a_model_that_the_hub_does_not_give_is_refused(tmp_path, monkeypatch, location, text, engine_host):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with serve_hub({}) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert text in await refusal(engine_host, location)


async def test_a_hub_that_cannot_be_reached_is_reported(tmp_path, monkeypatch, engine_host):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached; check the network" in await refusal(engine_host, "somebody/something")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("model", ["storyteller", "normalizer"])
def test_a_model_loads_without_a_warning_of_its_libraries(caplog, monkeypatch, model):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    auto = AutoModelForCausalLM if model == "storyteller" else AutoModelForSeq2SeqLM
    with caplog.at_level(logging.WARNING):
        load_weights(model, MODELS / model, auto, "auto", torch.device("cpu"))
    assert caplog.messages == []


def test_a_missing_device_is_refused():
    with pytest.raises(StartupError, match="DEVICE=cuda, but torch finds no CUDA device; install its CUDA build"):
        choose_device("cuda")
