"""The cache takes free memory only, and the error message says if that is too little."""

import copy
import types

import pytest
import torch
import transformers

from headrace.errors import StartupError, StartupFault
from headrace_predictor.engine.runners import memory
from headrace_predictor.engine.runners.memory import (
    cache_memory,
    cache_shape,
    container_memory_left,
    plan_memory,
    stated_context,
)
from headrace_predictor.settings import PredictorSettings
from tests.random_models import random_model

CPU = torch.device("cpu")
GIB = 1 << 30


def cgroup(folder, limit, used, file_pages=0):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    active = min(1, file_pages)
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {file_pages - active}\nactive_file {active}\n")
    return folder


def test_a_containers_limit_counts_without_the_pages_of_files(tmp_path):
    assert container_memory_left(cgroup(tmp_path, 4 * GIB, 3 * GIB, GIB)) == 2 * GIB


def test_no_limit_differs_from_no_memory_left(tmp_path):
    assert container_memory_left(tmp_path / "absent") is None
    assert container_memory_left(cgroup(tmp_path, "max", 3 * GIB)) is None


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [("max", 64 * GIB, 3 * GIB), (64 * GIB, 64 * GIB, 3 * GIB), (6 * GIB, 64 * GIB, 2 * GIB), ("max", 3 * GIB, GIB)],
)
def test_the_default_is_a_whole_context_and_a_gibibyte_within_a_share_of_what_is_free(
    tmp_path, monkeypatch, limit, available, expected
):
    left = container_memory_left(cgroup(tmp_path, limit, 2 * GIB, GIB))
    monkeypatch.setattr(memory, "container_memory_left", lambda: left)
    (tmp_path / "meminfo").write_text(f"MemFree:  1 kB\nMemAvailable:  {available >> 10} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    settings = PredictorSettings()
    assert cache_memory("m", CPU, settings, 2 * GIB, GIB) == expected
    # Two models share the memory: together they have no more than one.
    settings = settings.model_copy(update={"memory_share": settings.memory_share / 2})
    assert 2 * cache_memory("m", CPU, settings, 9999 * GIB, GIB) == (memory.memory_left() - GIB) // 2


def test_a_machine_that_does_not_state_its_memory_has_a_gibibyte(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(memory, "container_memory_left", lambda: None)
    assert cache_memory("m", CPU, PredictorSettings(), 2 * GIB) == GIB


def test_only_weights_that_are_still_pages_of_files_are_subtracted(monkeypatch):
    """Converted weights have memory of their own, which is not free any more."""
    model = copy.deepcopy(random_model("llama"))
    size = sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
    monkeypatch.setattr(memory, "memory_left", lambda: size)
    with pytest.raises(StartupFault, match="needs"):
        plan_memory("llama", model, cache_shape(model), PredictorSettings())
    model.are_pages_of_files = False
    assert plan_memory("llama", model, cache_shape(model), PredictorSettings()).context > 0


@pytest.mark.parametrize(("tokens", "running"), [(700, 32), (64 * 256 + 32, 64), (200_000, 256)])
def test_as_many_run_at_once_as_have_a_useful_context(tokens, running):
    model = random_model("llama")
    shape = cache_shape(model)
    settings = PredictorSettings(kv_cache_memory=str(shape.bytes_per_token * tokens))
    assert plan_memory("llama", model, shape, settings).max_running == running
    settings = settings.model_copy(update={"max_running": 5})
    assert plan_memory("llama", model, shape, settings).max_running == 5


def test_a_cache_beyond_the_containers_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "container_memory_left", lambda: GIB)
    with pytest.raises(StartupError, match=r"is 2\.1 GB, but only 1\.1 are left"):
        cache_memory("m", CPU, PredictorSettings(kv_cache_memory="2GiB"))


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_on_one_gpu_take_their_shares_in_any_order(monkeypatch, replicas):
    total, taken = 80 * GIB, 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    settings = PredictorSettings(gpu_memory_share=0.85 / replicas)
    for _ in range(replicas):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=total - taken - 2 * GIB: (free, total))
        memory_of_one = cache_memory("m", torch.device("cuda"), settings)
        assert memory_of_one == int(total * 0.85 / replicas) - 2 * GIB
        assert cache_memory("m", torch.device("cuda"), settings, weights=-GIB) == memory_of_one + GIB
        taken += memory_of_one + 2 * GIB
    assert taken <= total


def test_an_encoder_decoder_model_needs_room_for_prompt_and_output():
    model = random_model("t5")
    shape = cache_shape(model)
    settings = PredictorSettings(kv_cache_memory=str(shape.bytes_per_token * 700), max_context=300)
    plan = plan_memory("t5", model, shape, settings)
    assert plan.context == 300
    assert plan.blocks >= 600 / 32
    with pytest.raises(StartupError, match="context 400 needs"):
        plan_memory("t5", model, shape, settings.model_copy(update={"max_context": 400}))


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 64),
    ],
)
def test_a_scaling_of_positions_extends_the_context_unless_it_is_stated_scaled(scaling, context):
    config = types.SimpleNamespace(max_position_embeddings=64, rope_parameters=scaling)
    assert stated_context(config) == context


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(n_positions=48, n_ctx=48),
        transformers.MptConfig(max_seq_len=48),
        transformers.BloomConfig(seq_length=48),
        transformers.DbrxConfig(max_seq_len=48),
        transformers.T5Config(n_positions=48),
        transformers.LEDConfig(max_decoder_position_embeddings=48),
    ],
)
def test_the_context_is_stated_under_each_familys_own_name(config):
    assert stated_context(config) == 48
    assert stated_context(transformers.MambaConfig()) is None
