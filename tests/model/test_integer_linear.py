"""Linear layers of 8 and 4 bits in models of any runner: products, and answers that nothing beside them changes."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from headrace.errors import StartupError
from headrace_predictor.engine.cpu.integer_linear import Quantisation
from headrace_predictor.engine.cpu.packed_file import SUFFIX, PackedFile
from headrace_predictor.engine.cpu.packed_linear import PackedLinear, pack_mixtures
from headrace_predictor.engine.gpu import Matrix
from headrace_predictor.engine.runners.gpu_decoder import quantise
from tests.model.random_crowd import LENGTHS, PROMPTS, crowd, random_engines, read_all, request
from tests.support import plain_kernels
from tests.support.full import usually
from tests.support.in_process_engine import submit
from tests.support.integer_reference import Linear
from tests.support.threads import torch_threads
from tests.waiting import until
from tests.zoo import FAMILIES

FORMATS = ("int8", "int4")
ROWS, INPUTS, OUTPUTS = 150, 200, 130  # No multiples of a block, a panel or a chunk.


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])) * 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_product_is_that_of_the_reference(format_, dtype):
    weight, bias, x = numbers(OUTPUTS, INPUTS).to(dtype), numbers(OUTPUTS).to(dtype), numbers(ROWS, INPUTS).to(dtype)
    layer = PackedLinear(weight, bias, format_)
    expected = Linear(weight.float().numpy(), bias.float().numpy(), format_ == "int4")(x.float().numpy())
    assert torch.equal(layer(x), torch.from_numpy(expected).to(dtype))
    assert torch.equal(layer(x[None, :3]), layer(x)[None, :3])
    assert layer(x[:0]).shape == (0, OUTPUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_a_gpu_is_the_same(dtype):
    weight, bias, x = numbers(OUTPUTS, INPUTS).to(dtype), numbers(OUTPUTS).to(dtype), numbers(ROWS, INPUTS).to(dtype)
    x[1] *= 1e-37
    expected = PackedLinear(weight, bias, "int8")(x)
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    quantise(nn.Sequential(layer))
    assert torch.equal(plain_kernels.linear(x, Matrix(layer.weight, layer.bias, layer.weight.scales)), expected)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_depends_neither_on_threads_nor_on_those_beside_it(format_):
    layer, x = PackedLinear(numbers(OUTPUTS, INPUTS), None, format_), numbers(ROWS, INPUTS)
    whole = layer(x)
    with torch_threads(1):
        assert torch.equal(layer(x), whole)
    for row in (0, 64, ROWS - 1):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])


def test_a_head_of_a_4_bit_model_has_8():
    weight, x = numbers(OUTPUTS, INPUTS), numbers(3, INPUTS)
    wide = PackedLinear(weight, None, "int4", True)
    assert torch.equal(wide(x), torch.from_numpy(Linear(weight.numpy(), None, False)(x.numpy())))


# Transposed weights, caps, sinks and experts, unlike value sizes, a router whose last bits decide; recurrent states;
# attention of their own; one row; encoder-decoders.
USUAL = {
    ("Gemma 3, text", "int8"), ("GPT-2", "int4"), ("GPT-OSS", "int8"), ("DeepSeek V3, R1, Kimi K2", "int4"),
    ("Qwen 3 MoE", "int8"), ("Mamba", "int8"), ("BLOOM", "int8"), ("Doge", "int8"), ("BART", "int8"),
}  # fmt: skip
SERVED = {family.name: family for family in FAMILIES if family.is_served}


@pytest.mark.parametrize("case", usually(USUAL, product(SERVED, FORMATS)), ids="-".join)
@pytest.mark.filterwarnings("default")  # Of transformers' own models.
async def test_answers_are_the_same_alone_in_a_crowd_and_continued(case):
    name, format_ = case
    with random_engines() as engine_of:
        engine = engine_of(SERVED[name].model(), weights=format_)
        assert engine.description["weights"] == format_
        alone = [
            await read_all(submit(engine, request(str(i), prompt, length)))
            for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        assert len({tuple(ids) for ids in alone}) > len(PROMPTS) // 2
        assert await crowd(engine) == alone
        rest = await read_all(submit(engine, request("rest", PROMPTS[0], LENGTHS[0], alone[0][:11])))
        assert alone[0][:11] + rest == alone[0]


def test_what_a_pass_does_not_call_and_what_chooses_experts_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.gate, self.head = (nn.Linear(64, 64) for _ in range(3))
            self.called = FalconLinear(64, 64)
            self.again = self.called

        def get_output_embeddings(self):
            return self.head

        def forward(self, x):
            return self.head(self.gate(self.called(nn.functional.linear(x, self.read.weight))))

    model, x = Model().requires_grad_(False), numbers(3, 64)
    expected = model(x)
    quantised = Quantisation("int4", lambda size: PackedFile())
    quantised(model, lambda: model(x))
    assert [type(layer) for layer in (model.read, model.called, model.gate, model.head)] == [
        *(nn.Linear, PackedLinear, nn.Linear, PackedLinear)
    ]
    assert model.again is model.called
    assert (model(x) - expected).norm() < 0.2 * expected.norm()
    # In blocks of 128 inputs 8 and 4.25 bits a weight, the head's scales; what stayed.
    assert quantised.weights_bytes == 64 * 128 + 64 * 68 + 4 * 64 + 2 * 4 * (64 * 64 + 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_chooses_experts_gives_a_row_the_same_numbers_beside_any_others(dtype):
    class Wide(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x.type(torch.float32), self.weight.type(torch.float32), self.bias.float())

    layers = {"called": nn.Linear(64, 64), "gate": Wide(64, 4), "router": nn.Sequential(nn.Linear(64, 4))}
    model, x = nn.ModuleDict(layers).requires_grad_(False).to(dtype), numbers(75, 64).to(dtype)
    model.get_output_embeddings = lambda: None
    choosing = (model.gate, model.router)
    expected = [layer(x) for layer in choosing]
    Quantisation("int8", lambda size: PackedFile())(model, lambda: [layer(x) for layer in layers.values()])
    assert type(model.called) is PackedLinear
    for layer, exact in zip(choosing, expected, strict=True):
        together = layer(x)
        torch.testing.assert_close(together, exact)
        assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), together)
    weight = model.gate.weight  # Without the layer's bias, and of half of its rows.
    torch.testing.assert_close(nn.functional.linear(x, weight), x @ weight.plain.t())
    torch.testing.assert_close(nn.functional.linear(x, weight[:2]), x @ weight.plain[:2].t())


EXPERTS = [(MixtralExperts, MixtralConfig), (GptOssExperts, GptOssConfig)]
CHOSEN = torch.tensor([[0, 2], [2, 0], [3, 2], [0, 3], [2, 3], [0, 2], [3, 0], [2, 0], [0, 3]])  # Nobody chooses 1.


def random_experts(kind, config):
    experts = kind(config(hidden_size=192, intermediate_size=64, num_local_experts=4)).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.copy_(numbers(*parameter.shape))
    experts.get_output_embeddings = lambda: None
    return experts, numbers(9, 192), numbers(9, 2).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "config"), [*EXPERTS, (NemotronHExperts, NemotronHConfig)])
def test_packed_experts_have_the_numbers_of_the_model_s_in_any_crowd(kind, config, dtype):
    experts, x, weights = random_experts(kind, config)
    experts, x, weights = experts.to(dtype), x.to(dtype), weights.to(dtype)
    experts.device, experts.dtype = x.device, x.dtype
    exact = experts(x, CHOSEN, weights)
    pack_mixtures(experts, lambda: experts(x, CHOSEN, weights))
    together = experts(x, CHOSEN, weights)
    assert (together - exact).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * exact.norm()
    alone = [experts(*own) for own in zip(x.split(1), CHOSEN.split(1), weights.split(1), strict=True)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("kind", "config"), EXPERTS)
def test_experts_of_one_tensor_are_products_of_the_reference(kind, config, format_):
    experts, x, weights = random_experts(kind, config)
    tensors, names = dict(experts.named_parameters()), ("gate_up_proj", "down_proj")

    def product(name, expert, row):
        weight, bias = tensors[name][expert], tensors.get(f"{name}_bias")
        weight = weight.t() if experts.is_transposed else weight
        bias = None if bias is None else bias[expert].numpy()
        return torch.from_numpy(Linear(weight.contiguous().numpy(), bias, format_ == "int4")(row.numpy()))

    opened = [[product(names[0], expert, row[None]) for expert in own] for row, own in zip(x, CHOSEN, strict=True)]
    closed = [
        torch.cat([product(names[1], expert, experts._apply_gate(one)) for expert, one in zip(own, ones, strict=True)])
        for own, ones in zip(CHOSEN, opened, strict=True)
    ]
    expected = torch.stack([(one * weight[:, None]).sum(0) for one, weight in zip(closed, weights, strict=True)])
    exact = experts(x, CHOSEN, weights)
    quantised = Quantisation(format_, lambda size: PackedFile())
    quantised(experts, lambda: experts(x, CHOSEN, weights))
    assert torch.equal(experts(x, CHOSEN, weights), expected)
    assert torch.equal(experts(x[4:5], CHOSEN[4:5], weights[4:5]), expected[4:5])
    assert (expected - exact).norm() < 0.2 * exact.norm()
    assert not [*experts.parameters()]


async def test_packed_weights_are_mapped_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace_predictor.engine.cpu.packed_file._has_huge_pages", lambda memory: True)
    linear, path, answers = nn.Sequential(nn.Linear(256, 512)).requires_grad_(False), tmp_path / f"x{SUFFIX}", []
    for mapped in (0, 512 * 256 + 4 * 512):
        model = copy.deepcopy(linear)
        model.get_output_embeddings = lambda: None
        quantised = Quantisation("int8", lambda size: PackedFile(path, size, 1 << 30))
        quantised(model, lambda model=model: model(torch.ones(1, 256)))
        assert quantised.mapped_bytes == mapped
        answers.append(model(torch.ones(2, 256)))
        await until(path.exists)
        linear[0].weight.zero_()  # Is not read again.
    assert torch.equal(*answers)


def test_a_model_without_a_layer_to_quantise_is_refused():
    model = nn.Sequential(nn.ReLU())
    model.get_output_embeddings = lambda: None
    with pytest.raises(StartupError, match="no linear layer"):
        Quantisation("int8", lambda size: PackedFile())(model, lambda: model(torch.ones(1, 4)))
