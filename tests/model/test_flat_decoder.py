"""The flat forward pass equals that of transformers, and replaces no other."""

import pytest
import torch

from headrace_predictor.engine.cpu.packed_linear import pack_linears
from headrace_predictor.engine.runners.fused_layers import fuse_layers
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import FlatDecoder, PagedRunner
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from tests.model.bfloat16 import PACKED_DTYPES
from tests.random_models import ARCHITECTURES, random_model
from tests.zoo import VOCABULARY

FLAT = ["llama", "llama_long", "mistral", "qwen2", "qwen3"]


def fused(architecture, dtype=torch.float32):
    model = random_model(architecture).to(dtype)
    fuse_layers(model)
    pack_linears(model)
    return model


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
    return torch.cat(steps)


@pytest.mark.parametrize("architecture", FLAT)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_it_equals_transformers_around_the_layers(architecture, dtype, monkeypatch):
    model = fused(architecture, dtype)
    assert FlatDecoder.takes(model)
    got = logits(model).float()
    monkeypatch.setattr(FlatDecoder, "takes", lambda model: False)
    expected = logits(model).float()
    # Only the last norm rounds differently.
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {*FLAT, "llama_dynamic"}))
def test_other_models_keep_their_own_forward_pass(architecture):
    assert not FlatDecoder.takes(fused(architecture))


def test_a_subclass_and_a_model_with_other_layers_keep_their_own_forward_pass():
    model = random_model("llama")
    assert not FlatDecoder.takes(model)
    model = fused("llama")
    model.__class__ = type("Llama", (type(model),), {})
    assert not FlatDecoder.takes(model)
