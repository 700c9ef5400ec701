"""Packed layers equal the original ones, and a row's result does not depend on its batch."""

import copy

import pytest
import torch
from torch import nn

from headrace_predictor.engine.cpu.packed_linear import PackedLinear, pack_linears
from tests.random_models import random_model
from tests.support.threads import torch_threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (1000, 16), (3000, 130)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_gets_the_same_bits_in_every_batch_and_with_any_threads(dtype, inputs, outputs, bias):
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(inputs, outputs, bias).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    x = torch.randn(1, 70, inputs, generator=generator).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        whole = packed(x)
        assert whole.dtype == dtype
        torch.testing.assert_close(whole, layer(x), atol=tolerance, rtol=tolerance)
        for threads in (1, 2):
            with torch_threads(threads):
                for rows in (1, 2, 3, 8, 17, 33):
                    for begin in (0, 5, 70 - rows):
                        part = slice(begin, begin + rows)
                        assert torch.equal(packed(x[:, part]), whole[:, part])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_has_the_same_logits(architecture, dtype):
    model = random_model(architecture).to(dtype)
    packed = copy.deepcopy(model)
    pack_linears(packed)
    assert not any(type(module) is nn.Linear for module in packed.modules())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        expected, got = (one(input_ids=ids, **decoder).logits.float() for one in (model, packed))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_other_dtypes_are_not_packed():
    model = random_model("llama").to(torch.float64)
    pack_linears(model)
    assert any(type(module) is nn.Linear for module in model.modules())
