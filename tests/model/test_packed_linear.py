"""Packed layers equal the original ones, and a row's result does not depend on its batch."""

import copy

import pytest
import torch
from torch import nn

from headrace_predictor.engine.cpu.packed_linear import PackedLinear, pack_linears
from tests.model.bfloat16 import PACKED_DTYPES, needs_bfloat16_processor
from tests.random_models import random_model


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16_processor)])
@pytest.mark.parametrize("width", [64, 3072])
def test_a_row_gets_the_same_bits_in_every_batch(dtype, width):
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(width, 96).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    x = torch.randn(1, 70, width, generator=generator).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), layer(x), atol=2e-2, rtol=2e-2)
        other = torch.randn(1, 70, 96, generator=generator).to(dtype)
        for compute in (
            lambda x, other: packed(x),
            lambda x, other: packed(x, "relu"),
            lambda x, other: packed(x, "swish"),
            lambda x, other: packed.plus(x, other),
            lambda x, other: packed.times(x, other),
        ):
            whole = compute(x, other)
            for rows in (1, 2, 3, 8, 17, 33):
                for begin in (0, 5, 70 - rows):
                    part = slice(begin, begin + rows)
                    assert torch.equal(compute(x[:, part], other[:, part].contiguous()), whole[:, part])


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (1000, 64), (3000, 130), (3000, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_few_rows_have_the_bits_of_onednn(inputs, outputs, bias):
    layer = nn.Linear(inputs, outputs, bias)
    with torch.inference_mode():
        packed = PackedLinear(layer.weight, layer.bias)
        x = torch.randn(2, 10, inputs)
        whole = packed(x)
        torch.testing.assert_close(whole, layer(x), atol=1e-4, rtol=1e-4)
        for rows in range(1, 10):
            assert torch.equal(packed(x[:, :rows]), whole[:, :rows])
    assert packed._few_rows or torch.get_num_threads() > 1 or not torch.cpu.get_capabilities().get("avx512_f")


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_a_product_is_fused_with_the_operation_after_it(dtype):
    generator = torch.Generator().manual_seed(1)
    first, second = nn.Linear(64, 96).to(dtype), nn.Linear(64, 32).to(dtype)
    packed, both = PackedLinear(first.weight, first.bias), PackedLinear.of(first, second)
    x, other = (torch.randn(1, 5, width, generator=generator).to(dtype) for width in (64, 96))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    with torch.inference_mode():
        torch.testing.assert_close(packed(x, "relu"), first(x).relu(), **close)
        torch.testing.assert_close(packed(x, "swish"), nn.functional.silu(first(x)), **close)
        torch.testing.assert_close(packed.plus(x, other), first(x) + other, **close)
        torch.testing.assert_close(packed.times(x, other), first(x) * other, **close)
        torch.testing.assert_close(both(x), torch.cat((first(x), second(x)), -1), **close)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
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
