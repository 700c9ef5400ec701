"""Fused layers equal those of transformers, and replace no others."""

import copy

import pytest
import torch
import transformers as hf

from headrace_predictor.engine.runners.fused_layers import GatedLayer, OPTLayer, fuse_layers
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from tests.model.bfloat16 import PACKED_DTYPES
from tests.random_models import ARCHITECTURES, random_model
from tests.zoo import VOCABULARY

FUSED = ["llama", "llama_dynamic", "llama_long", "mistral", "opt", "qwen2", "qwen3"]
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def count_fused(model):
    return sum(isinstance(module, GatedLayer | OPTLayer) for module in model.modules())


def logits(model):
    """Logits of a prompt in two chunks, the second beside another sequence's first token."""
    runner = PagedRunner(model, cache_shape(model), 8)
    one, other = (detached_sequence([(7 * i + k) % VOCABULARY for i in range(50)]) for k in (1, 2))
    one.blocks, other.blocks = [1, 2], [3, 4]
    with torch.inference_mode():
        first = runner.run([Row(one, 0, 45)])
        one.ids, other.ids = one.ids[:50], other.ids[:1]
        return torch.cat((first, runner.run([Row(one, 45, 5), Row(other, 0, 1)])))


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_a_fused_model_has_the_same_logits(architecture, dtype):
    model = random_model(architecture).to(dtype)
    fused = copy.deepcopy(model)
    fuse_layers(fused)
    assert count_fused(fused) == model.config.num_hidden_layers
    expected, got = logits(model).float(), logits(fused).float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(FUSED)))
def test_other_layers_are_unchanged(architecture):
    model = random_model(architecture)
    fuse_layers(model)
    assert count_fused(model) == 0


@pytest.mark.parametrize(
    "model",
    [
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=64, hidden_act="gelu")),
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**SMALL, word_embed_proj_dim=64, ffn_dim=64, do_layer_norm_before=False)
        ),
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**SMALL, word_embed_proj_dim=64, ffn_dim=64, activation_function="gelu")
        ),
        lambda: random_model("llama").double(),
    ],
    ids=["llama with gelu", "opt with later norms", "opt with gelu", "float64"],
)
def test_unsupported_models_are_unchanged(model):
    model = model()
    fuse_layers(model)
    assert count_fused(model) == 0
