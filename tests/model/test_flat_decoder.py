"""Fused and packed layers and the flat forward pass equal those of transformers, and replace no others."""

import copy

import pytest
import torch
import transformers as hf

from headrace_predictor.engine.cpu.packed_linear import pack_linears
from headrace_predictor.engine.runners.fused_layers import GatedLayer, OPTLayer, fuse_layers
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import FlatDecoder, PagedRunner
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from tests.model.bfloat16 import PACKED_DTYPES
from tests.random_models import random_model
from tests.zoo import VOCABULARY

FLAT = ["llama", "llama_long", "mistral", "qwen2", "qwen3"]
FUSED = [*FLAT, "llama_dynamic", "opt"]
FLOAT32, BFLOAT16 = PACKED_DTYPES
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def fused(model):
    fuse_layers(model)
    pack_linears(model)
    return model


def count_fused(model):
    return sum(isinstance(module, GatedLayer | OPTLayer) for module in model.modules())


def logits(model):
    """Logits of a first chunk of a prompt, of its rest beside another's first token, and of two decoding sequences."""
    runner = PagedRunner(model, cache_shape(model), 8)
    one, other = (detached_sequence([(7 * i + k) % VOCABULARY for i in range(50)]) for k in (1, 2))
    one.blocks, other.blocks = [1, 2], [3, 4]
    with torch.inference_mode():
        steps = [runner.run([Row(one, 0, 45)])]
        other.ids = other.ids[:1]
        steps.append(runner.run([Row(one, 45, 5), Row(other, 0, 1)]))
        one.ids.append(3)
        other.ids.append(5)
        steps.append(runner.run([Row(one, 50, 1), Row(other, 1, 1)]))
    assert [len(step) for step in steps] == [0, 2, 2]
    return torch.cat(steps).float()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("architecture", FUSED)
def test_a_fused_model_has_the_same_logits(architecture, dtype):
    model = random_model(architecture).to(dtype)
    expected, faster = logits(copy.deepcopy(model)), fused(model)
    assert count_fused(faster) == model.config.num_hidden_layers
    assert architecture not in FLAT or FlatDecoder.takes(faster)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (logits(faster) - expected).abs().max() <= tolerance * expected.abs().max()


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
        lambda: random_model("gemma"),
    ],
    ids=["llama with gelu", "opt with later norms", "opt with gelu", "float64", "gemma"],
)
def test_unsupported_models_are_unchanged(model):
    model = fused(model())
    assert count_fused(model) == 0
    assert not FlatDecoder.takes(model)


def test_a_subclass_and_a_model_with_other_layers_keep_their_own_forward_pass():
    model = random_model("llama")
    assert not FlatDecoder.takes(model)
    fused(model).__class__ = type("Llama", (type(model),), {})
    assert not FlatDecoder.takes(model)
