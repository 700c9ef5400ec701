"""Engines of small random models, and twelve requests whose answers must equal those of transformers' `generate`."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.settings import PredictorSettings
from tests.model.fakes import engines
from tests.random_models import greedy, random_model
from tests.support.in_process_engine import submit
from tests.support.requests import submission
from tests.zoo import VOCABULARY

# Of very different lengths, on both sides of the blocks' 32 tokens; some outputs cross into the next one.
PROMPTS = [
    [(17 * i * i + 5 * j * j + 11 * j + 3) % (VOCABULARY - 3) + 3 for j in range(length)]
    for i, length in enumerate([1, 2, 5, 9, 16, 17, 23, 31, 32, 40, 64, 75])
]
LENGTHS = [33, 9, 30, 26, 20, 18, 12, 9, 9, 14, 9, 9]
# Prompts are cut into chunks of 32 tokens at most.
_TIGHT = {"max_running": 12, "max_waiting": 64, "step_tokens": 32, "max_context": 110}


def request(name: str, prompt: Sequence[int], length: int, output_ids: Sequence[int] = (), **given: Any):
    parameters = {"max_tokens": length, "min_tokens": length, "temperature": 0, "seed": 1, **given}
    return submission(name, list(prompt), SamplingParameters(**parameters), list(output_ids))


async def read_all(slot: MergingSlot) -> list[int]:
    ids: list[int] = []
    while True:
        chunk = await slot.read()
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            return ids


def submit_crowd(engine: ContinuousBatchingEngine) -> list[MergingSlot]:
    requests = zip(PROMPTS, LENGTHS, strict=True)
    return [submit(engine, request(str(i), prompt, length)) for i, (prompt, length) in enumerate(requests)]


async def crowd(engine: ContinuousBatchingEngine) -> list[list[int]]:
    return [await read_all(slot) for slot in submit_crowd(engine)]


def generate_crowd(model: Any) -> list[list[int]]:
    """The expected ids of each request."""
    expected = [greedy(model, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    # Else the comparison would hold for models that repeat one token, or that do not see their prompt.
    assert len({tuple(ids[:9]) for ids in expected}) == len(PROMPTS)
    assert sum(len(set(ids)) > 4 for ids in expected) > len(PROMPTS) // 2
    return expected


@cache
def model_and_crowd(architecture: str) -> tuple[Any, list[list[int]]]:
    """The random model, which tests share and must not change, and the crowd's expected ids."""
    model = random_model(architecture)
    return model, generate_crowd(model)


def tight_settings(model: Any, cache_tokens: int, **given: Any) -> PredictorSettings:
    """Settings of an engine with memory for so many tokens."""
    memory = str((cache_tokens + 32) * cache_shape(model).bytes_per_token)
    return PredictorSettings(**{**_TIGHT, "kv_cache_memory": memory, **given})


def random_engines() -> AbstractContextManager[Callable[..., ContinuousBatchingEngine]]:
    """Makes engines of copies of models, with memory for so many tokens, and closes them at the end."""

    def make(model: Any, cache_tokens: int = 4000, **given: Any) -> ContinuousBatchingEngine:
        return build_engine("test", copy.deepcopy(model), tight_settings(model, cache_tokens, **given))

    return engines(make)
