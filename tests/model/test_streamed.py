"""Streamed weights: bit for bit the same in any batch, and of integers on any machine."""

import copy
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.errors import StartupError
from headrace_predictor.engine.cpu.angles import inverse_frequencies, scaled
from headrace_predictor.engine.cpu.formats import pack
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.reach import find_reaches
from headrace_predictor.engine.runners.streamed import StreamedDecoder, weight_format
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from tests.model.random_crowd import LENGTHS, PROMPTS, crowd, random_engines, read_all, request
from tests.random_models import random_model, save_portable_model
from tests.support.in_process_engine import submit
from tests.support.integer_reference import IntegerModel, hash_of_tokens

ROOT = Path(__file__).parents[2]
PROMPT = [(7 * i * i + 3 * i) % 200 + 4 for i in range(60)]
# The relative error of the last logits of a random model, whose weights are as hard to round as any.
ERRORS = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.08, "int4": 0.8}
CACHES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.float32}
# A window, biases, norms of heads.
USUAL = {("qwen3", "fp32"), ("mistral", "bf16"), ("qwen2", "int8"), ("qwen3", "int4")}
ANSWERS, TOKENS = 20, 500
_PORTABLE = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+sse4.2"}


def streamed_runner(model, format_, threads=2):
    """A runner whose cache has the format's type: a program is compiled for each pair of them, in a minute."""
    model.to(CACHES[format_])
    find_reaches(model, 512)
    return PagedRunner(model, cache_shape(model), 80, streamed=StreamedDecoder(model, format_, threads))


def last_logits(runner, ids, ends):
    """The logits at each of `ends`, where a chunk of the prompt ends."""
    sequence = detached_sequence(ids)
    sequence.blocks = list(range(1, 9))
    found, start = [], 0
    with torch.inference_mode():
        for end in ends:
            sequence.ids = ids[:end]
            found.append(runner.run([Row(sequence, start, end - start)])[0].clone())
            start = end
    return found


@pytest.mark.parametrize(
    ("architecture", "format_"),
    [
        pytest.param(name, format_, marks=() if (name, format_) in USUAL or name == "llama" else pytest.mark.full)
        for name in ("llama", "mistral", "qwen2", "qwen3")
        for format_ in ERRORS
    ],
)
def test_logits_are_near_transformers_and_the_same_in_any_chunks_and_threads(architecture, format_):
    model = random_model(architecture)
    ids = [(7 * i * i + 3 * i) % 50 + 4 for i in range(60)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
    runner = streamed_runner(copy.deepcopy(model), format_)
    (whole,) = last_logits(runner, ids, [60])
    assert (whole - expected).norm() <= ERRORS[format_] * expected.norm()
    for threads in (1, 2):
        runner = streamed_runner(copy.deepcopy(model), format_, threads)
        for ends in ([7, 8, 9, 33, 59, 60], [5, 60]):
            assert torch.equal(last_logits(runner, ids, ends)[-1], whole)


async def test_answers_are_the_same_alone_in_a_crowd_and_continued():
    model, weights = random_model("qwen3"), "int4"
    with random_engines() as engine_of:
        engine = engine_of(model, weights=weights)
        alone = [
            await read_all(submit(engine, request(str(i), prompt, length)))
            for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        assert await crowd(engine) == alone
        # With memory for a part of it, so that sequences are preempted.
        assert await crowd(engine_of(model, cache_tokens=400, weights=weights)) == alone
        rest = await read_all(submit(engine, request("rest", PROMPTS[0], LENGTHS[0], alone[0][:11])))
        assert alone[0][:11] + rest == alone[0]


def answers_of(runner, count, tokens):
    """Greedy answers of the runner for prompts of a few ids, all in each step."""
    sequences = [detached_sequence([i + 1, i + 2, 7]) for i in range(count)]
    with torch.inference_mode():
        for i, sequence in enumerate(sequences):
            width = -(-(tokens + 4) // 32)
            sequence.blocks = list(range(1 + i * width, 1 + (i + 1) * width))
        rows = [Row(sequence, 0, 3) for sequence in sequences]
        for step in range(tokens):
            for sequence, best in zip(sequences, runner.run(rows).argmax(-1).tolist(), strict=True):
                sequence.ids = [*sequence.ids, best]
            rows = [Row(sequence, 3 + step, 1) for sequence in sequences]
    return [sequence.ids[3:] for sequence in sequences]


def hash_of(folder, format_, dtype="float32", count=4, tokens=60):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    find_reaches(model, 1024)
    blocks = 1 + count * -(-(tokens + 4) // 32)
    runner = PagedRunner(model, cache_shape(model), blocks, streamed=StreamedDecoder(model, format_, 2))
    return hash_of_tokens(answers_of(runner, count, tokens))


@pytest.mark.parametrize(
    ("count", "tokens"), [(4, 60), pytest.param(ANSWERS, TOKENS, marks=pytest.mark.full, id="10,000 tokens")]
)
@pytest.mark.parametrize(("format_", "dtype", "cache"), [("int8", "bfloat16", "bf16"), ("int4", "float32", "fp32")])
def test_the_reference_gives_the_same(count, tokens, format_, dtype, cache, tmp_path):
    save_portable_model(tmp_path)
    reference = IntegerModel(tmp_path, format_, cache)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    (logits,) = last_logits(streamed_runner(model, format_), PROMPT, [60])
    assert logits.numpy().tobytes() == reference.logits(PROMPT)[-1].tobytes()
    prompts = [[i + 1, i + 2, 7] for i in range(count)]
    expected = hash_of_tokens(reference.generate_all(prompts, tokens))
    assert hash_of(tmp_path, format_, dtype, count, tokens) == expected


@pytest.mark.full  # It compiles the kernels for another processor.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86's kernels have integer dot products")
@pytest.mark.parametrize("format_", ["int8", "int4"])
def test_kernels_without_integer_dot_products_give_the_same(format_, tmp_path):
    save_portable_model(tmp_path)
    program = f"from tests.model.test_streamed import hash_of; print(hash_of({str(tmp_path)!r}, {format_!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | _PORTABLE | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == hash_of(tmp_path, format_), done.stderr


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling):
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters={"rope_theta": 5e5, **scaling})
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(scaled(inverse_frequencies(5e5, 64), config.rope_parameters), expected, rtol=1e-6)


@pytest.mark.parametrize("format_", ERRORS)
@pytest.mark.parametrize("interleave", [False, True])
def test_packed_rows_are_those_of_the_matrix(format_, interleave):
    matrices = [torch.randn(n, 200, generator=torch.Generator().manual_seed(n)) * 0.02 for n in (70, 130)]
    packed = pack(format_, *matrices, file=PackedFile(), interleave=interleave)
    places = torch.arange(70 + 130)
    if interleave:  # 128 and 192 rows in panels of 64: the first matrix' panels are 0 and 2.
        places = torch.cat([torch.arange(64), torch.arange(128, 134), torch.arange(64, 128), torch.arange(192, 256)])
        matrices[1] = matrices[1][:128]
    error = (packed.rows(places) - torch.cat(matrices)).norm() / torch.cat(matrices).norm()
    assert error <= {"fp32": 0.0, "bf16": 0.003, "int8": 0.01, "int4": 0.1}[format_]


@pytest.mark.parametrize(("architecture", "reason"), [("gemma3", "none of LlamaForCausalLM"), ("gpt2", "none of")])
def test_what_cannot_be_computed_is_refused_by_name(architecture, reason):
    with pytest.raises(StartupError, match=reason):
        weight_format("chat", random_model(architecture), "q8_0")
    assert weight_format("chat", random_model(architecture), "int8") is None  # See test_integer_linear.py.


def test_float_weights_are_streamed_as_they_are():
    model = random_model("llama")
    assert weight_format("chat", model, "auto") == "fp32"
    assert weight_format("chat", copy.deepcopy(model).to(torch.bfloat16), "auto") == "bf16"
    assert weight_format("chat", copy.deepcopy(model).double(), "auto") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
        lambda model: setattr(model, "__class__", type("Llama", (type(model),), {})),
    ],
    ids=["another activation", "a subclass"],
)
def test_a_model_that_may_compute_something_else_keeps_its_own_forward_pass(change):
    model = copy.deepcopy(random_model("llama"))
    change(model)
    assert weight_format("chat", model, "auto") is None


def test_numbers_that_are_none_are_not_hidden():
    model = copy.deepcopy(random_model("llama"))
    model.model.embed_tokens.weight.data[5, 3] = float("inf")
    for format_ in ERRORS:
        (logits,) = last_logits(streamed_runner(copy.deepcopy(model), format_), [5, 6, 7], [3])
        assert not torch.isfinite(logits).all()
