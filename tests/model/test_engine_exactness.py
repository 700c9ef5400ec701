"""Crowded, chunked, preempted, sampled, resumed: every request gets the same answer as alone."""

from collections.abc import Callable

import pytest
import torch

from services.predictor.engine import build
from services.predictor.engine.cpu import kernel
from services.predictor.engine.runners import attention
from services.predictor.engine.runners import paged as paged_runner
from services.predictor.engine.runners.memory import cache_shape
from services.predictor.engine.runners.paged import PagedRunner, self_test
from tests.model.bfloat16 import needs_bfloat16_processor
from tests.model.random_crowd import (
    LENGTHS,
    PROMPTS,
    crowd,
    generate_crowd,
    model_and_crowd,
    random_engines,
    read_all,
    request,
)
from tests.random_models import ARCHITECTURES, ONE_ROW, PAGED, RAGGED, VOCABULARY, random_model

KINDS = {"paged": PAGED, "one row": ONE_ROW, "ragged": RAGGED}
# Of PAGED: sliding window and grouped queries; rotary positions; learned positions.
PORTABLE = ("gemma3", "llama", "opt")


@pytest.fixture
def engine_of():
    with random_engines() as make:
        yield make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_crowd_gets_the_answers_of_generate(architecture, engine_of):
    model, expected = model_and_crowd(architecture)
    engine = engine_of(model, cache_tokens=240)
    assert engine.description["runner"].startswith(next(kind for kind in KINDS if architecture in KINDS[kind]))
    assert await crowd(engine) == expected
    # There are blocks for two of the longest sequences: some had to be computed again.
    assert engine.statistics.preempted > 0
    assert engine.load.blocks_in_use == 0


@pytest.mark.parametrize(
    "architecture", [*PORTABLE, *(pytest.param(name, marks=pytest.mark.full) for name in PAGED if name not in PORTABLE)]
)
async def test_the_portable_attention_gives_the_same(architecture, engine_of, monkeypatch):
    monkeypatch.setattr(kernel, "takes", lambda query: False)
    model, expected = model_and_crowd(architecture)
    assert await crowd(engine_of(model, cache_tokens=400)) == expected


async def test_several_threads_give_the_same(engine_of):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model, expected = model_and_crowd("qwen3")
        assert await crowd(engine_of(model)) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("compiled", [True, False])
async def test_fixed_buffers_of_padded_rows_and_blocks_give_the_same(engine_of, monkeypatch, compiled):
    """CUDA graphs without a GPU: replaying a recorded pass calls it."""
    recorded = []

    def record(forward: Callable[[], torch.Tensor]):
        recorded.append(forward)
        return forward

    def recording_runner(model, shape, blocks, _, adapters):
        return PagedRunner(model, shape, blocks, record, adapters)

    monkeypatch.setattr(build, "PagedRunner", recording_runner)
    if not compiled:
        monkeypatch.setattr(kernel, "takes", lambda query: False)
    model, expected = model_and_crowd("gemma3")
    assert await crowd(engine_of(model, cache_tokens=400)) == expected
    assert len(recorded) > 2


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.full),
        ("t5", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=needs_bfloat16_processor),
    ],
)
async def test_sampling_gives_the_same_alone_in_a_crowd_and_continued(architecture, dtype, engine_of):
    model = random_model(architecture).to(dtype)
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1, "presence_penalty": 0.3}

    def sampled(i, **given):
        return request(f"r{i}", PROMPTS[i % 12], 12, **{**sampling, "seed": i, **given})

    alone_engine, engine = engine_of(model, max_running=1), engine_of(model, max_running=16)
    alone = [await read_all(alone_engine.submit(sampled(i))) for i in range(16)]
    assert len({tuple(ids) for ids in alone}) == 16
    slots = [engine.submit(sampled(i)) for i in range(16)]
    assert [await read_all(slot) for slot in slots] == alone
    slots = [engine.submit(sampled(i, output_ids=alone[i][: 1 + i % 11])) for i in range(16)]
    assert [alone[i][: 1 + i % 11] + await read_all(slot) for i, slot in enumerate(slots)] == alone


async def test_a_continuation_from_every_prefix_gives_the_same(engine_of):
    engine = engine_of(random_model("opt"))
    whole = await read_all(engine.submit(request("whole", PROMPTS[7], 12, temperature=1.0)))
    for cut in range(1, 12):
        rest = await read_all(engine.submit(request("rest", PROMPTS[7], 12, whole[:cut], temperature=1.0)))
        assert whole[:cut] + rest == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
async def test_other_dtypes_are_served(engine_of, dtype):
    model = random_model("llama").to(dtype)
    results, expected = await crowd(engine_of(model)), generate_crowd(model)
    if dtype == torch.float64:
        assert results == expected
    else:
        # Rounding differs between batch shapes; most generated tokens do not.
        same = sum(
            a == b for ids, wanted in zip(results, expected, strict=True) for a, b in zip(ids, wanted, strict=True)
        )
        assert same > 0.5 * sum(LENGTHS)


def test_the_self_test_finds_a_model_whose_attention_is_not_replaced():
    model = random_model("llama")
    with torch.inference_mode():
        assert self_test(model, cache_shape(model), VOCABULARY) is None
        assert model.config._attn_implementation == attention.NAME
    wrong = random_model("llama")
    for layer in wrong.model.layers:
        layer.self_attn.scaling = 3.0
    with torch.inference_mode():
        shape = cache_shape(wrong)
        expected = wrong(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
        original = paged_runner.PagedRunner.run

        def misled(self, rows):
            for layer in wrong.model.layers:
                layer.self_attn.scaling = 0.1
            return original(self, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_runner.PagedRunner, "run", misled)
            assert "differ" in (self_test(wrong, shape, VOCABULARY) or "")
    assert wrong.config._attn_implementation != attention.NAME
    assert expected.isfinite().all()
