"""A model that cannot be served is refused when it is loaded, in one line with advice."""

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from headrace.errors import StartupError
from headrace.models.sources import ModelSource
from headrace_predictor.generation import loading
from headrace_predictor.models import weights
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.models.weights import choose_device, load_weights
from headrace_predictor.repository.loading import build, fetch_model
from headrace_predictor.settings import PredictorSettings
from tests.hub import GATED, serve_hub
from tests.random_models import random_model
from tests.zoo import FAMILIES

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
        (
            {"dtype": "fp32", "kv_cache_memory": "100KiB", "max_context": 512},
            "context 512 needs 0.0017 GB, have 0.0001",
        ),
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


async def test_weights_without_one_of_their_files_are_refused_with_its_name(tmp_path, engine_host):
    AutoModelForCausalLM.from_pretrained(STORYTELLER).save_pretrained(tmp_path, max_shard_size="2MB")
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
    (last := max(tmp_path.glob("*.safetensors"))).unlink()
    assert last.name in await refusal(engine_host, str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 9000}, "do not fit: model.embed_tokens.weight is [1536, 192], config.json makes it"),
        ({"num_hidden_layers": 20}, "lacks model.layers.10.input_layernorm.weight"),
        ({"architectures": ["OPTForQuestionAnswering"]}, "OPTForQuestionAnswering is not served"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "WhisperForConditionalGeneration is not an archit"),
        ({"model_type": "nothing_like_it"}, "nothing_like_it"),
        ({"rope_theta": "500000", "rope_parameters": None}, "rope_theta in config.json is the text '500000', not a n"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor in config.json is the text '2', not a n"),
        ({"attn_config": {"rope_theta": 5e5}}, "transformers leaves out rope_theta=500000.0 in config.json"),
        ({"rotary_dim": 8}, "transformers leaves out rotary_dim=8 in config.json"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "of config.json transformers refuses 'ntk'"),
    ],
)
async def test_weights_and_classes_that_do_not_fit_are_refused_by_name(tmp_path, changes, reason, engine_host):
    shutil.copytree(STORYTELLER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert reason in await refusal(engine_host, tmp_path)


@pytest.mark.parametrize(
    ("auto", "name", "value", "is_refused"),
    [
        (AutoModelForCausalLM, "model.layers.1.self_attn.q_proj.bias", 0.5, True),
        (AutoModelForCausalLM, "model.layers.1.self_attn.q_proj.bias", 0.0, False),
        (AutoModelForCausalLM, "model.layers.0.self_attn.q_norm.weight", 1.0, True),
        (AutoModel, "model.layers.0.self_attn.q_norm.weight", 1.0, True),
        (AutoModelForCausalLM, "model.embedding_norm.weight", 1.0, True),
        (AutoModelForCausalLM, "model.wpe.weight", 1.0, True),
        (AutoModelForCausalLM, "model.layers.2.self_attn.q_proj.weight", 1.0, False),  # Predicts further tokens.
        (AutoModelForCausalLM, "model.layers.3.self_attn.q_proj.weight", 1.0, True),
        (AutoModelForCausalLM, "model.layers.0.self_attn.rotary_emb.inv_freq", 1.0, False),
        (AutoModelForCausalLM, "model.layers.0.self_attn.attn.bias", 1.0, False),
        (AutoModelForCausalLM, "model.layers.0.self_attn.k_scale", 1.0, False),
        (AutoModelForCausalLM, "v_head.summary.weight", 1.0, False),
    ],
)
def test_a_tensor_that_the_class_would_leave_out_is_refused_where_it_changes_answers(
    tmp_path, auto, name, value, is_refused
):
    model, file = random_model("llama"), tmp_path / "model.safetensors"
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path)
    save_file(load_file(file) | {name: torch.full((64,), value)}, file, metadata={"format": "pt"})
    refused = pytest.raises(StartupError, match=f"has {name}, without which") if is_refused else nullcontext()
    with refused:
        load_weights("x", tmp_path, auto, "fp32", torch.device("cpu"))


@pytest.mark.parametrize(
    ("part", "reason"),
    [("w1", "does a layer lack an expert"), ("w2", r"down_proj is \[3, .*, config.json makes it \[4")],
)
def test_a_mixture_that_lacks_an_expert_is_refused(tmp_path, part, reason):
    next(family for family in FAMILIES if family.name == "Mixtral").initialised().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state[f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=reason):
        load_weights("x", tmp_path, AutoModelForCausalLM, "fp32", torch.device("cpu"))


def test_a_configuration_that_asks_for_tuples_has_no_effect(tmp_path):
    random_model("bart").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    model = load_weights("x", tmp_path, AutoModelForSeq2SeqLM, "fp32", torch.device("cpu"))
    ids = torch.tensor([[5, 6]])
    assert model(input_ids=ids, decoder_input_ids=ids).logits.shape == (1, 2, model.config.vocab_size)


@pytest.mark.parametrize("holder", ["whole", "text"])
def test_a_head_is_tied_where_the_configuration_of_a_model_of_images_or_of_its_decoder_says_so(tmp_path, holder):
    family = next(family for family in FAMILIES if family.name == "Qwen 3.5")
    family.initialised().save_pretrained(tmp_path)
    config, state = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"], state["lm_head.weight"]
    (config if holder == "whole" else config["text_config"])["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_weights("x", tmp_path, loading._auto_class("x", tmp_path), "fp32", torch.device("cpu"))
    assert model.lm_head.weight is model.get_input_embeddings().weight


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


@pytest.mark.parametrize(
    ("architecture", "stored", "multiplies", "computed"),
    [
        ("llama", torch.bfloat16, True, "bfloat16"),
        ("llama", torch.float16, True, "bfloat16"),
        ("llama", torch.bfloat16, False, "float32"),
        ("llama", torch.float32, True, "float32"),
        ("doge", torch.bfloat16, True, "float32"),
    ],
)
def test_a_model_of_16_bits_is_computed_in_bfloat16_where_that_is_fast_and_exact(
    tmp_path, monkeypatch, caplog, architecture, stored, multiplies, computed
):
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: multiplies)
    random_model(architecture).to(stored).save_pretrained(tmp_path)
    settings = PredictorSettings(kv_cache_memory="16MiB", max_context=100)
    with caplog.at_level(logging.INFO):
        loaded = loading.load_generation("m", tmp_path, True, settings, torch.device("cpu"))
    loaded.engine.close()
    assert loaded.dtype == computed
    weights = loaded.engine.description["weights"]
    assert weights in (computed, "fp32" if computed == "float32" else "bf16")
    numbers = " ".join(dict.fromkeys([computed, weights])) + loaded.engine.description.get("angles", "")
    assert loaded.fingerprint == fingerprint_of(tmp_path, numbers, True)
    (line,) = (record.getMessage() for record in caplog.records if record.name == loading.__name__)
    slots = 32 if architecture == "doge" else loaded.engine.description["max_running"]
    assert f"{computed} on cpu, {torch.get_num_threads()} threads, {slots} sequences at once, context 100 of" in line
    assert "KV cache of 0.0" in line


@pytest.mark.parametrize(
    ("has", "multiplies"),
    [({"avx512_bf16": True}, True), ({"avx512_bf16": False}, False), ({"bf16": True}, True), ({}, False)],
)
def test_the_processor_is_asked_whether_it_multiplies_bfloat16(monkeypatch, has, multiplies):
    # A timed product would differ on a busy machine, and so would the numbers of a predictor that restarts there.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert weights.multiplies_bfloat16() == multiplies


def test_a_large_model_takes_all_of_a_few_cores_and_nothing_more_than_is_set(monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for cores, set_to, size in [(2, 0, 1 << 20), (2, 0, 1 << 30), (4, 0, 1 << 30), (16, 0, 1 << 30), (2, 1, 1 << 30)]:
        monkeypatch.setattr(weights, "_default_threads", lambda cores=cores: cores)
        weights.prepare_torch(PredictorSettings(device="cpu", threads=set_to), size)
    assert taken == [1, 2, 4, 15, 1]


def test_a_missing_device_is_refused():
    with pytest.raises(StartupError, match="DEVICE=cuda, but torch finds no CUDA device; install its CUDA build"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("stored", "cache", "weights"), [(torch.bfloat16, "bfloat16", "int8"), (torch.float32, "float32", "int4")]
)
def test_integer_weights_have_a_fingerprint_of_their_own_and_less_memory(tmp_path, caplog, stored, cache, weights):
    model = random_model("qwen3").to(stored)
    model.save_pretrained(tmp_path)
    settings = PredictorSettings(kv_cache_memory="16MiB", max_context=100, weights=weights)
    with caplog.at_level(logging.INFO):
        loaded = loading.load_generation("m", tmp_path, True, settings, torch.device("cpu"))
    loaded.engine.close()
    assert (loaded.dtype, loaded.engine.description["weights"]) == (cache, weights)
    assert (
        loaded.fingerprint
        == fingerprint_of(tmp_path, f"{cache} {weights}", True)
        != fingerprint_of(tmp_path, cache, True)
    )
    assert any(f"{weights} weights, {cache} cache on cpu" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("architecture", "dtype"), [("gemma3", "bfloat16"), ("mamba", "float32"), ("t5", "float32")])
def test_integer_weights_of_other_models_have_the_dtype_that_their_runner_is_fast_in(tmp_path, architecture, dtype):
    random_model(architecture).to(torch.bfloat16).save_pretrained(tmp_path)
    settings = PredictorSettings(kv_cache_memory="16MiB", max_context=100, weights="int8")
    loaded = loading.load_generation("m", tmp_path, True, settings, torch.device("cpu"))
    loaded.engine.close()
    assert (loaded.dtype, loaded.engine.description["weights"]) == (dtype, "int8")
    assert loaded.fingerprint == fingerprint_of(tmp_path, f"{dtype} int8", True)


def test_a_model_without_room_on_the_gpu_is_refused_with_the_figures(tmp_path, monkeypatch):
    random_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**9))
    with pytest.raises(StartupError, match=r"its weights are .* GB, and 1e-06 of the GPU's 1 GB are free"):
        load_weights("big", tmp_path, AutoModelForCausalLM, "fp32", torch.device("cuda"))
