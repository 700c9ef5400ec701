"""The NumPy reference of int8 and int4 weights: near to torch's floats, and the same tokens everywhere."""

import numpy as np
import pytest
import torch

from tests.random_models import ROOT, save_portable_model, save_random_model
from tests.support.integer_reference import IntegerModel, hash_of_tokens

IDS = list(range(3, 80))


def relative_error(results, wanted):
    return np.sqrt(np.square(results - wanted).mean()) / wanted.std()


def torch_logits(model):
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_it_computes_the_model(architecture, tmp_path):
    model = save_random_model(architecture, tmp_path)
    assert relative_error(IntegerModel(tmp_path, "int8", "fp32").logits(IDS), torch_logits(model)) < 0.1
    reference = IntegerModel(tmp_path, "int4", "bf16")
    linears = [module for layer in reference.layers for module in vars(layer).values() if hasattr(module, "rows")]
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    places = [layer.get_submodule(name) for layer in model.model.layers for name in names]
    for module, linear in [
        *zip(places, linears, strict=True),
        (model.model.embed_tokens, reference.embedding),
        (model.lm_head, reference.head),
    ]:
        module.weight.data = torch.from_numpy(linear.rows(range(len(module.weight))).copy())
    assert relative_error(reference.logits(IDS), torch_logits(model)) < 0.1


def test_a_window_hides_what_is_before_it(tmp_path):
    model = save_random_model("mistral", tmp_path)
    unlimited = torch_logits(model)
    model.config.sliding_window = 30
    model.save_pretrained(tmp_path)
    results = IntegerModel(tmp_path, "int8", "fp32").logits(IDS)
    assert relative_error(results, torch_logits(type(model).from_pretrained(tmp_path))) < 0.1
    assert relative_error(results, unlimited) > 0.1


def test_answers_are_the_same_alone_and_in_a_crowd():
    model = IntegerModel(ROOT / "models" / "storyteller", "int4", "bf16")
    prompts = [IDS[:3], IDS[:40], IDS[7:17]]
    assert model.generate_all(prompts, 30) == [model.generate(prompt, 30) for prompt in prompts]


@pytest.mark.parametrize(("weights", "digest"), [("int8", "8aa71cb03c4913b2"), ("int4", "15202f2feb55a294")])
def test_tokens_are_the_same_everywhere(weights, digest, tmp_path):
    save_portable_model(tmp_path)
    model = IntegerModel(tmp_path, weights, "bf16")
    answers = model.generate_all([[i, 100 + i] for i in range(20)], 100)
    assert len({tuple(answer[-50:]) for answer in answers}) > 10
    assert hash_of_tokens(answers)[:16] == digest
