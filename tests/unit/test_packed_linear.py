"""Packed layers compute what theirs computed, and a row the same in whatever batch it stands."""

import copy

import pytest
import torch
from torch import nn

from services.predictor.engine.packed_linear import PackedLinear, pack_linears
from tests.random_models import random_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 3072])
def test_a_row_gets_the_same_bits_in_every_batch(dtype, width):
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(width, 96).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    x = torch.randn(1, 70, width, generator=generator).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), layer(x), atol=2e-2, rtol=2e-2)
        whole = packed(x)
        for rows in (1, 2, 3, 8, 17, 33):
            for begin in (0, 5, 70 - rows):
                assert torch.equal(packed(x[:, begin : begin + rows]), whole[:, begin : begin + rows])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_computes_what_it_did(architecture, dtype):
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


def test_other_dtypes_stay_as_they_are():
    model = random_model("llama").to(torch.float64)
    pack_linears(model)
    assert any(type(module) is nn.Linear for module in model.modules())
