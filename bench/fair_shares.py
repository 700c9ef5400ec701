"""The effect of a client with many streams on one with few: milliseconds to the first token, in the engine.

`light` has one request after another, prompts of 32 tokens and 16 tokens out, with a pause between. It is `quiet`
(alone), `beside` 200 streams of another client of the same weight (32 tokens, 64 out, one after another), or part of
the `same` client as these, as without keys. Times are the engine's own: from the submission to the first token. A round
measures each of the three once, in random order, in one process with random weights and every setting by default.

`python -m bench.fair_shares` writes bench/results/fair_shares.json; two minutes.
"""

import asyncio
import random
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.architectures import CONFIGS
from bench.runs import machine, parser, write
from bench.statistics import quantile
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from tests.support.in_process_engine import submit

_RANDOM = random.Random(1)  # noqa: S311
_HEAVY = 200
_PROMPT_TOKENS, _HEAVY_TOKENS, _LIGHT_TOKENS = 32, 64, 16
_WARM_UP_S, _PAUSE_S = 2.0, 0.05
# The number of other streams, and their client.
_CASES = {"quiet": (0, ""), "beside": (_HEAVY, "heavy"), "same": (_HEAVY, "light")}


def main() -> None:
    options = parser(__doc__, "fair_shares")
    options.add_argument("--rounds", type=int, default=2, help="rounds (default 2)")
    options.add_argument("--requests", type=int, default=6, help="of the light client in each case (default 6)")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIGS["llama-10M"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    settings = PredictorSettings(max_running=32)
    engine = build_engine("llama-10M", model, settings)
    first_token_ms: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(given.rounds):
            for case in _RANDOM.sample(list(_CASES), len(_CASES)):
                first_token_ms[case] += asyncio.run(_measure(engine, *_CASES[case], given.requests))
    finally:
        engine.close()
    cases = {case: {"p50_ms": median(ms), "p95_ms": quantile(ms, 0.95)} for case, ms in first_token_ms.items()}
    for case in _CASES:
        print(f"{case:8} p50 {cases[case]['p50_ms']:7.1f} ms   p95 {cases[case]['p95_ms']:7.1f} ms")
    write(given.out, {"machine": machine(), "max_running": settings.max_running, "first_token": cases})


async def _measure(engine: ContinuousBatchingEngine, others: int, client: str, requests: int) -> list[float]:
    """Milliseconds to the first token of each of the light client's requests."""
    tasks = [asyncio.create_task(_repeat(engine, client)) for _ in range(others)]
    try:
        if others:
            await asyncio.sleep(_WARM_UP_S)
        times = []
        for _ in range(requests):
            times.append(1000 * await _first_token_s(engine, "light", _LIGHT_TOKENS))
            await asyncio.sleep(_RANDOM.uniform(0, 2 * _PAUSE_S))
        return times
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.load.running or engine.load.waiting:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.01)


async def _repeat(engine: ContinuousBatchingEngine, client: str) -> None:
    while True:
        await _first_token_s(engine, client, _HEAVY_TOKENS)


async def _first_token_s(engine: ContinuousBatchingEngine, client: str, tokens: int) -> float:
    prompt = [_RANDOM.randrange(10, 1000) for _ in range(_PROMPT_TOKENS)]
    sampling = SamplingParameters(max_tokens=tokens, temperature=0.0, seed=1, chunk_ms=1000)
    slot = submit(
        engine,
        Submission(request_id=client, prompt_ids=prompt, sampling=sampling.model_dump_json().encode(), client=client),
    )
    try:
        while (await slot.read()).finish_reason is None:
            pass
    finally:
        slot.cancel()
    timeline = slot.timeline
    if timeline.first_token is None:
        raise RuntimeError("an answer without a token")
    return timeline.first_token - timeline.submitted


if __name__ == "__main__":
    main()
