"""The Triton kernels beside their plain twins: on a GPU where there is one, else by Triton's interpreter."""

import os
import subprocess
import sys
from itertools import accumulate

import numpy as np
import pytest
import torch

from headrace_predictor.engine.gpu import Matrix
from headrace_predictor.engine.runners.gpu_decoder import quantise
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.engine.state.attention import Range, Scores
from tests.random_models import random_model
from tests.support import plain_kernels as plain
from tests.support.full import usually
from tests.zoo import VOCABULARY

kernels = pytest.importorskip("headrace_predictor.engine.gpu.kernels", exc_type=ImportError)  # Triton is for Linux.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies no bfloat16.
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def close(ours, plains):
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, plains, atol=tolerance, rtol=tolerance)


class Step:
    """A random step: decoding sequences, then chunks, in blocks of a shuffled cache."""

    def __init__(self, random, heads, size, value_size, page, dtype, window=0):
        lengths = [int(random.integers(1, 160 + page)) for _ in range(random.integers(2, 5 if page == 32 else 3))]
        counts = [1] * int(random.integers(0, len(lengths) + 1))
        counts += [int(random.integers(2, 40)) for _ in range(len(lengths) - len(counts))]
        lengths = [max(length, count) for length, count in zip(lengths, counts, strict=True)]
        blocks = [-(-length // page) for length in lengths]
        order = random.permutation(sum(blocks)) + 1
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, (first, end) in enumerate(zip([0, *accumulate(blocks)], accumulate(blocks), strict=False)):
            table[row, : end - first] = torch.from_numpy(order[first:end])
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        ends = torch.tensor([start + i + 1 for start, count in zip(starts, counts, strict=True) for i in range(count)])
        owners = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)])
        firsts = (ends - window).clamp(min=0) if window else torch.zeros_like(ends)
        self.total = int(ends.shape[0])
        begins = [0, *accumulate(counts)]

        def tiles(most):
            tiles = [begins[row] + at for row, count in enumerate(counts) for at in range(0, count, most)]
            return torch.tensor([*tiles, self.total], dtype=torch.int32, device=DEVICE)

        tensors = (tensor.int().to(DEVICE) for tensor in (table, owners, firsts, ends))
        self.tokens = Range(*tensors, sum(count == 1 for count in counts), tiles)
        number = sum(blocks) + 2
        generator = torch.Generator().manual_seed(int(random.integers(1 << 30)))
        self.random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
        memory = self.random(number, 3 * heads * page * (size + value_size))  # Layers of a block are together.
        self.keys = memory.view(number, -1)[:, : heads * size * page].view(number, heads, size, page)
        value_at = 2 * heads * size * page
        self.values = memory[:, value_at : value_at + heads * value_size * page].view(number, heads, page, value_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "size", "value_size", "page", "kind"),
    [
        *((2, 2, 16, 16, 32, kind) for kind in ("plain", "window", "cap", "sinks", "position")),
        (1, 7, 64, 64, 32, "plain"),
        (2, 1, 24, 16, 32, "window"),
        (2, 3, 24, 16, 32, "distance"),
        pytest.param(1, 20, 40, 40, 256, "sinks", marks=pytest.mark.full),
    ],
)
def test_attention_is_that_of_the_plain_one(heads, group, size, value_size, page, kind, dtype):
    random = np.random.default_rng([group, size, page, len(kind)])
    for is_exact in (False, True):
        step = Step(random, heads, size, value_size, page, dtype, window=21 if kind == "window" else 0)
        sinks = step.random(heads * group) if kind == "sinks" else None
        biases = {"position": 200, "distance": 40}
        bias = step.random(heads * group, biases[kind]).float() if kind in biases else None
        scores = Scores(size**-0.5, 5.0 if kind == "cap" else 0.0, sinks, bias, by_position=kind == "position")
        queries = step.random(step.total, heads * group + 3, size)[:, 1 : 1 + heads * group]  # Of a wider row.
        arguments = queries, step.keys, step.values, step.tokens, scores
        close(kernels.operations(is_exact).attend(*arguments), plain.attend(*arguments))


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_token_has_the_same_bits_alone_and_among_others(is_exact):
    step = Step(np.random.default_rng(3), 2, 16, 16, 32, torch.float32)
    queries = step.random(step.total, 4, 16)
    attend = kernels.operations(is_exact).attend
    together = attend(queries, step.keys, step.values, step.tokens, Scores(0.25))
    tokens, of_one = step.tokens, lambda most: torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    among = (
        tokens.decodes if not is_exact else step.total
    )  # Chunks have tiles of their own where that is not asked for.
    for i in range(among):
        one = slice(i, i + 1)
        table = tokens.table[tokens.owners[one].long()]
        alone = Range(table, torch.zeros_like(tokens.owners[one]), tokens.firsts[one], tokens.ends[one], 1, of_one)
        answer = attend(queries[one], step.keys, step.values, alone, Scores(0.25))
        assert torch.equal(answer[0], together[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_and_keys_are_turned_and_stored(dtype, has_norms):
    heads, group, size, page = 2, 3, 24, 32
    step = Step(np.random.default_rng(5), heads, size, size, page, dtype)
    packed = step.random(step.total, (group + 2) * heads * size)
    angles = step.random(step.total, size // 2).float()
    rotary = tuple(turn(torch.cat((angles, angles), -1)).to(dtype) for turn in (torch.cos, torch.sin))
    norm = (step.random(2, size), 1e-6) if has_norms else None
    outcomes = []
    for operations in (kernels, plain):
        keys, values = step.keys.clone(), step.values.clone()
        queries = operations.turn_and_store(packed.clone(), rotary, norm, keys, values, step.tokens)
        outcomes.append((queries, keys, values))
    for ours, plains in zip(*outcomes, strict=True):
        close(ours, plains)
    assert not torch.equal(outcomes[0][1], step.keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 96)])
def test_gates_are_those_of_torch(rows, size, dtype):
    hidden = Step(np.random.default_rng(7), 1, 16, 16, 32, dtype).random(rows, size)
    close(kernels.gate(hidden), plain.gate(hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 100), (70, 33, 64)])
def test_a_row_of_a_product_does_not_depend_on_the_others(rows, outputs, inputs, dtype):
    step = Step(np.random.default_rng(9), 1, 16, 16, 32, dtype)
    x, weight, bias = step.random(rows, inputs), step.random(outputs, inputs), step.random(outputs)
    matrix = Matrix(weight, bias)
    together = kernels.linear(x, matrix)
    close(
        together / inputs**0.5,
        torch.nn.functional.linear(x.float(), weight.float(), bias.float()).to(dtype) / inputs**0.5,
    )
    assert torch.equal(kernels.linear(x[-1:], matrix)[0], together[-1])
    for is_exact in (False, True):
        total = step.random(rows, outputs)
        expected = plain.linear(x, matrix, total) / inputs**0.5
        added = kernels.operations(is_exact).linear(x, matrix, total)
        close(added / inputs**0.5, expected)
        assert added is total


@pytest.mark.filterwarnings("ignore:invalid value")  # Of what is no number, by the interpreter.
@pytest.mark.parametrize("rows", [3, 70])
def test_an_int8_product_is_that_of_the_plain_one_bit_by_bit(rows):
    step = Step(np.random.default_rng(11), 1, 16, 16, 32, torch.float32)
    layer = torch.nn.Linear(200, 90).to(DEVICE)
    quantise(torch.nn.Sequential(layer))
    matrix = Matrix(layer.weight.data, layer.bias.data, layer.weight.scales)
    x = step.random(rows, 200)
    x[1] *= 1e-37
    x[2, 128:] = 0
    assert torch.equal(kernels.linear(x, matrix), plain.linear(x, matrix))
    x[0, 5] = torch.inf
    assert kernels.linear(x, matrix)[0].isnan().all()


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("family", usually(("qwen3",), ["qwen3", "llama", "gpt_oss"]))
def test_a_model_has_its_own_logits_by_the_kernels(family, is_exact):
    model = random_model(family).float().to(DEVICE)
    with torch.inference_mode():
        proof = Proof(model, cache_shape(model), VOCABULARY, 128)
        assert proof.of_paged(kernels.operations(is_exact)) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="they run on one")
def test_the_kernels_compile_for_a_gpu(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_kernels", "90", "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == {"_attend", "_join", "_turn_and_store", "_gate", "_linear"}
    assert max(int(shared) for *_, shared in lines) <= 99 << 10  # What a block has on every GPU since Ampere.
