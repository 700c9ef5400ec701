"""A model that cannot be served is refused when it is loaded, in one line that says what to do."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from millrace.errors import StartupError
from millrace.models.sources import ModelSource
from services.predictor.models.weights import choose_device, load_weights
from services.predictor.repository.loading import build, fetch_model
from services.predictor.settings import PredictorSettings
from tests.hub import GATED, serve_hub

MODELS = Path(__file__).parents[2] / "models"
STORYTELLER = MODELS / "storyteller"


def load(source, settings):
    fetched = fetch_model(source, lambda _: None)
    return build(source, fetched, settings, torch.device("cpu"), lambda _: None)


def refusal(location, **settings):
    """What is said of the model "x", from there and under these settings."""
    settings = {"device": "cpu", **settings}
    with pytest.raises(StartupError) as refused:
        load(ModelSource("x", str(location)), PredictorSettings(**settings))
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
def test_a_context_that_the_model_or_the_memory_has_not(settings, text):
    assert text in refusal(STORYTELLER, **settings)


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"version https://git-lfs"), ("generation_config.json", b"{"), ("config.json", b"{}")],
)
def test_damaged_files(tmp_path, name, content):
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    assert "cannot be loaded: " in refusal(tmp_path)


def test_a_folder_that_is_no_model(tmp_path):
    assert "has no config.json" in refusal(tmp_path)


def test_a_model_py_that_cannot_be_imported(tmp_path):
    (tmp_path / "model.py").write_text("import numpy\nimport nothing_like_it\n")
    assert "model.py, line 2 cannot be imported: ModuleNotFoundError: No module named" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (GATED, "somebody/gated is gated: accept its licence on the hub and set HF_TOKEN"),
        ("somebody/nothing", "somebody/nothing is neither a folder nor on the hub"),
    ],
)
def test_what_the_hub_does_not_give(tmp_path, monkeypatch, location, text):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with serve_hub({}) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert text in refusal(location)


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached; check the network" in refusal("somebody/something")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("model", ["storyteller", "normalizer"])
def test_a_model_loads_without_a_warning_of_its_libraries(caplog, monkeypatch, model):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    auto = AutoModelForCausalLM if model == "storyteller" else AutoModelForSeq2SeqLM
    with caplog.at_level(logging.WARNING):
        load_weights(model, MODELS / model, auto, "auto", torch.device("cpu"))
    assert caplog.messages == []


def test_a_device_that_is_not_there():
    with pytest.raises(StartupError, match="DEVICE=cuda, but torch finds no CUDA device; install its CUDA build"):
        choose_device("cuda")
