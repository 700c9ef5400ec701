"""Every architecture, crowded, chunked and preempted, gives exactly what `generate` gives each prompt alone."""

import asyncio
import copy

import pytest
import torch

from millrace.sampling import SamplingParameters
from services.predictor.engine.build import build_engine
from services.predictor.engine.interface import GenerationRequest
from services.predictor.settings import PredictorSettings
from tests.random_models import ARCHITECTURES, ONE_ROW, PAGED, RAGGED, VOCABULARY, greedy, random_model

# Twelve at once, of very different lengths.
PROMPTS = [
    [(17 * i * i + 5 * j * j + 11 * j + 3) % (VOCABULARY - 3) + 3 for j in range(n)]
    for i, n in enumerate([1, 2, 5, 9, 16, 17, 23, 31, 32, 40, 64, 75])
]
LENGTHS = [20, 33, 12, 25, 17, 40, 9, 30, 21, 16, 28, 35]
# Chunks of 16 to 32 tokens, and blocks for two of the longest sequences: prompts are cut and sequences preempted.
TIGHT = {"max_running": 12, "max_waiting": 64, "step_tokens": 32, "max_context": 110}


def settings_of(model, tokens, **given):
    from services.predictor.engine.memory import cache_shape

    memory = (tokens + 32) * cache_shape(model).bytes_per_token
    return PredictorSettings(**{**TIGHT, "kv_cache_memory": str(memory), **given})


async def read_all(slot):
    ids = []
    while True:
        chunk = await asyncio.wait_for(slot.read(), 60)
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            return ids, chunk


def request(name, prompt, length, **given):
    sampling = SamplingParameters(max_tokens=length, min_tokens=length, **{"temperature": 0, "seed": 1, **given})
    return GenerationRequest(name, list(prompt), sampling)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_crowd_gets_what_generate_gives(architecture):
    model = random_model(architecture)
    expected = [greedy(model, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    # Else the comparison would hold for models that repeat one token, or that do not see their prompt.
    assert len({tuple(ids[:9]) for ids in expected}) == len(PROMPTS)
    assert sum(len(set(ids)) > 4 for ids in expected) > len(PROMPTS) // 2
    engine = build_engine(architecture, copy.deepcopy(model), settings_of(model, 240))
    try:
        kind = next(name for name, group in KINDS.items() if architecture in group)
        assert engine.description["runner"].startswith(kind)
        slots = [
            engine.submit(request(str(i), prompt, length))
            for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        assert [(await read_all(slot))[0] for slot in slots] == expected
        assert engine.statistics.preempted > 0
        assert engine.blocks_in_use == 0
    finally:
        engine.close()


KINDS = {"paged": PAGED, "one row": ONE_ROW, "ragged": RAGGED}
