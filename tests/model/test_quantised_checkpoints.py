"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8 are the numbers that they state, computed as integers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import StartupError
from headrace_predictor.generation.loading import _auto_class, load_generation
from headrace_predictor.models.weights import load_weights, prepare_torch
from headrace_predictor.settings import PredictorSettings
from tests.model.test_gguf import _IDS, last_of, random_model
from tests.random_models import ROOT, TOKENIZER_FILES
from tests.zoo import FAMILIES

_ERROR = 0.05
_SIZE = 64  # Inputs of a group.
_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers, places=range(8)):
    """Rows of 4 bits [n, 8 m] in int32 [n, m]; the eighth that is at `places[i]` is the i-th half of a byte."""
    parts = numbers.long().reshape(len(numbers), -1, 8)
    packed = sum(parts[:, :, place] << 4 * i for i, place in enumerate(places))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def integers(weight, bits, size=_SIZE):
    """Unsigned integers [out, in], scales and zero points [out, groups], and the numbers that they stand for."""
    groups = weight.reshape(len(weight), -1, size)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    numbers = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 2**bits - 1)
    return numbers.flatten(1), scales, zeros, ((numbers - zeros[:, :, None]) * scales[:, :, None]).flatten(1)


def gptq(weight):
    numbers, scales, zeros, values = integers(weight, 4)
    own = {"qweight": words(numbers).t(), "qzeros": words((zeros - 1).t()), "scales": scales.t().half()}
    return {**own, "g_idx": (torch.arange(weight.shape[1]) // _SIZE).int()}, values


def gptq_by_activations(weight):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    parts, values = gptq(weight[:, order])
    back = order.argsort()
    unpacked = (parts["qweight"].t()[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(1)
    return {**parts, "qweight": words(unpacked[:, back]).t(), "g_idx": (back // _SIZE).int()}, values[:, back]


def awq(weight):
    numbers, scales, zeros, values = integers(weight, 4)
    return {
        "qweight": words(numbers.t(), _PLACES),
        "qzeros": words(zeros.t(), _PLACES),
        "scales": scales.t().half(),
    }, values


def packed(weight):
    scales = (weight.reshape(len(weight), -1, _SIZE).abs().amax(2) / 7).bfloat16()
    wide = scales.float().repeat_interleave(_SIZE, 1)
    numbers = (weight / wide).round().clamp(-8, 7)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words(numbers + 8), "weight_scale": scales, "weight_shape": shape}, numbers * wide


def of_8_bits(weight):
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()


def fp8(weight):
    scales = weight.abs().amax() / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales.reshape(1)}, numbers.float() * scales


def fp8_blocks(weight):
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    scales = 0.001 + 0.01 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(1))
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * wide


_CT = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}
METHODS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": _SIZE, "desc_act": False}),
    "gptq by activations": (
        gptq_by_activations,
        {"quant_method": "gptq", "bits": 4, "group_size": _SIZE, "desc_act": True},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": _SIZE, "version": "gemm", "zero_point": True}),
    "compressed-tensors, 4 bits": (packed, {**_CT, "format": "pack-quantized"}),
    "compressed-tensors, 8 bits": (of_8_bits, {**_CT, "format": "int-quantized"}),
    "compressed-tensors, fp8": (fp8, {**_CT, "format": "float-quantized"}),
    "fp8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}
_AS_NUMBERS = ("gptq by activations", "compressed-tensors, fp8", "fp8 in blocks")


def save(folder, name, method, **changed):
    """A checkpoint; returns the logits of the numbers that it states."""
    quantise, stated = METHODS[method]
    model, _ = random_model(name)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and path != "lm_head":
                del state[f"{path}.weight"]
                parts, values = quantise(module.weight)
                module.weight.copy_(values)
                state |= {f"{path}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        expected = model(torch.tensor([_IDS])).logits[0, -1]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    # Beside them, as in Mistral's folders, in its own form, which is not read.
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(1).to(torch.float8_e4m3fn)}, folder / "consolidated.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated | changed}))
    for file in TOKENIZER_FILES:
        (folder / file).write_bytes((ROOT / "models" / "storyteller" / file).read_bytes())
    return expected


def loaded(folder, **settings):
    own = PredictorSettings(weights_cache=folder / "cache", threads=2, dtype="fp32", **settings)
    return load_generation("model", folder, True, own, prepare_torch(own))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("qwen3", method) for method in METHODS),
        *(pytest.param("granite", method, marks=() if method == "awq" else pytest.mark.full) for method in METHODS),
    ],
)
def test_logits_are_those_of_the_stated_numbers(name, method, tmp_path):
    expected = save(tmp_path, name, method)
    generation = loaded(tmp_path)
    try:
        (found,) = last_of(generation)
    finally:
        generation.engine.close()
    streams = name == "qwen3" and method not in _AS_NUMBERS
    plain = "fp32" if name == "qwen3" else "float32"
    assert generation.engine.description["weights"] == (METHODS[method][1]["quant_method"] if streams else plain)
    assert (found - expected).norm() <= (_ERROR if streams else 1e-5) * expected.norm()


def test_the_tower_of_a_quantised_model_of_images_is_left_out(tmp_path):
    family = next(family for family in FAMILIES if family.name == "Llama 4")
    family.model().save_pretrained(tmp_path)
    state, path = load_file(tmp_path / "model.safetensors"), "language_model.model.layers.0.self_attn.q_proj"
    parts, values = awq(state.pop(f"{path}.weight"))
    parts = {f"{path}.{name}": part.contiguous() for name, part in parts.items()}
    save_file(state | parts, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": METHODS["awq"][1]}))
    model = load_weights("x", tmp_path, _auto_class("x", tmp_path), "fp32", torch.device("cpu"))
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, values)


@pytest.mark.parametrize(
    ("method", "name", "tensor", "reason"),
    [
        ("gptq", "q_proj.bias", torch.ones(256), "q_proj.bias, without which Qwen3ForCausalLM would"),
        ("awq", "k_proj.R4_weight", torch.ones(4), "R4_weight, which is not known"),
        ("awq", "codes", torch.ones(4, dtype=torch.int8), "is of torch.int8, without a scale"),
        ("compressed-tensors, 8 bits", "q_proj.weight_g_idx", torch.zeros(256), "ordered by activations"),
    ],
)
def test_tensors_that_are_not_known_are_refused(method, name, tensor, reason, tmp_path):
    save(tmp_path, "qwen3", method)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {f"model.layers.0.self_attn.{name}": tensor}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((StartupError, ValueError), match=reason):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("method", "changed", "reason"),
    [
        ("gptq", {"bits": 3}, "of 3 bits is not served"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not served"),
        ("awq", {"quant_method": "hqq"}, "quantised by hqq, which is not served"),
        # Methods that transformers skips, with their numbers but without their scales.
        ("fp8 in blocks", {"quant_method": "modelopt"}, "weight_scale_inv.*, without which"),
        ("compressed-tensors, 8 bits", {"quant_method": "unknown"}, "weight_scale.*, without which"),
    ],
)
def test_what_is_not_served_is_refused_by_name(method, changed, reason, tmp_path):
    save(tmp_path, "qwen3", method, **changed)
    with pytest.raises((StartupError, ValueError), match=reason):
        loaded(tmp_path)
