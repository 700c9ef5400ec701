"""Crowded, chunked, preempted, sampled, resumed: every request gets what it would get alone."""

import asyncio
import copy
from collections.abc import Callable

import pytest
import torch

from millrace.sampling import SamplingParameters
from services.predictor.engine import build
from services.predictor.engine.build import build_engine
from services.predictor.engine.cpu import kernel
from services.predictor.engine.interface import GenerationRequest
from services.predictor.engine.runners import attention
from services.predictor.engine.runners import paged as paged_runner
from services.predictor.engine.runners.memory import cache_shape
from services.predictor.engine.runners.paged import PagedRunner, self_test
from services.predictor.settings import PredictorSettings
from tests.model.bfloat16 import needs_bfloat16_processor
from tests.random_models import ARCHITECTURES, ONE_ROW, PAGED, RAGGED, VOCABULARY, greedy, random_model

KINDS = {"paged": PAGED, "one row": ONE_ROW, "ragged": RAGGED}
# Twelve at once, of very different lengths.
PROMPTS = [
    [(17 * i * i + 5 * j * j + 11 * j + 3) % (VOCABULARY - 3) + 3 for j in range(length)]
    for i, length in enumerate([1, 2, 5, 9, 16, 17, 23, 31, 32, 40, 64, 75])
]
LENGTHS = [20, 33, 12, 25, 17, 40, 9, 30, 21, 16, 28, 35]
# Prompts are cut into chunks of 32 tokens at most.
TIGHT = {"max_running": 12, "max_waiting": 64, "step_tokens": 32, "max_context": 110}


def settings_of(model, cache_tokens, **given):
    memory = str((cache_tokens + 32) * cache_shape(model).bytes_per_token)
    return PredictorSettings(**{**TIGHT, "kv_cache_memory": memory, **given})


def request(name, prompt, length, output_ids=(), **given):
    parameters = {"max_tokens": length, "min_tokens": length, "temperature": 0, "seed": 1, **given}
    return GenerationRequest(name, list(prompt), SamplingParameters(**parameters), list(output_ids))


async def read_all(slot):
    ids = []
    while True:
        chunk = await asyncio.wait_for(slot.read(), 60)
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            return ids


async def crowd(engine):
    slots = [
        engine.submit(request(str(i), prompt, length))
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    return [await read_all(slot) for slot in slots]


@pytest.fixture
def engine_of():
    engines = []

    def make(model, cache_tokens=4000, **given):
        engines.append(build_engine("test", copy.deepcopy(model), settings_of(model, cache_tokens, **given)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def expected_of(model):
    expected = [greedy(model, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    # Else the comparison would hold for models that repeat one token, or that do not see their prompt.
    assert len({tuple(ids[:9]) for ids in expected}) == len(PROMPTS)
    assert sum(len(set(ids)) > 4 for ids in expected) > len(PROMPTS) // 2
    return expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_crowd_gets_what_generate_gives(architecture, engine_of):
    model = random_model(architecture)
    engine = engine_of(model, cache_tokens=240)
    assert engine.description["runner"].startswith(next(kind for kind in KINDS if architecture in KINDS[kind]))
    assert await crowd(engine) == expected_of(model)
    # Blocks for two of the longest sequences: some had to be computed again.
    assert engine.statistics.preempted > 0
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("architecture", PAGED)
async def test_the_portable_attention_gives_the_same(architecture, engine_of, monkeypatch):
    monkeypatch.setattr(kernel, "takes", lambda query: False)
    model = random_model(architecture)
    assert await crowd(engine_of(model, cache_tokens=400)) == expected_of(model)


async def test_several_threads_give_the_same(engine_of):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = random_model("qwen3")
        assert await crowd(engine_of(model)) == expected_of(model)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("compiled", [True, False])
async def test_fixed_buffers_of_padded_rows_and_blocks_give_the_same(engine_of, monkeypatch, compiled):
    """What CUDA graphs replay, without a GPU: each recorded pass is the call itself."""
    recorded = []

    def record(forward: Callable[[], torch.Tensor]):
        recorded.append(forward)
        return forward

    def recording_runner(model, shape, blocks, _):
        return PagedRunner(model, shape, blocks, record)

    monkeypatch.setattr(build, "PagedRunner", recording_runner)
    if not compiled:
        monkeypatch.setattr(kernel, "takes", lambda query: False)
    model = random_model("gemma3")
    assert await crowd(engine_of(model, cache_tokens=400)) == expected_of(model)
    assert len(recorded) > 2


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.float32),
        ("gpt2", torch.float32),
        ("t5", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=needs_bfloat16_processor),
    ],
)
async def test_sampling_alone_in_a_crowd_and_continued_gives_the_same(architecture, dtype, engine_of):
    model = random_model(architecture).to(dtype)
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1, "presence_penalty": 0.3}

    def sampled(i, **given):
        return request(f"r{i}", PROMPTS[i % 12], 16, **{**sampling, "seed": i, **given})

    alone_engine, engine = engine_of(model, max_running=1), engine_of(model, max_running=32)
    alone = [await read_all(alone_engine.submit(sampled(i))) for i in range(32)]
    assert len({tuple(ids) for ids in alone}) == 32
    slots = [engine.submit(sampled(i)) for i in range(32)]
    assert [await read_all(slot) for slot in slots] == alone
    slots = [engine.submit(sampled(i, output_ids=alone[i][: 1 + i % 15])) for i in range(32)]
    assert [alone[i][: 1 + i % 15] + await read_all(slot) for i, slot in enumerate(slots)] == alone


async def test_a_continuation_from_every_prefix_gives_the_same(engine_of):
    engine = engine_of(random_model("opt"))
    whole = await read_all(engine.submit(request("whole", PROMPTS[7], 24, temperature=1.0)))
    for cut in range(1, 24):
        rest = await read_all(engine.submit(request("rest", PROMPTS[7], 24, whole[:cut], temperature=1.0)))
        assert whole[:cut] + rest == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
async def test_other_dtypes_are_served(engine_of, dtype):
    model = random_model("llama").to(dtype)
    results = await crowd(engine_of(model))
    if dtype == torch.float64:
        assert results == expected_of(model)
    else:
        # Rounding differs between batch shapes; most of what is generated does not.
        expected = expected_of(model)
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
