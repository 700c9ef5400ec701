"""Counts how often the batch changes an answer: alone compared with a crowd of 32, and resumed from half.

If the order of a product's sum depends on the batch, low-precision logits sometimes tie or change their order. `python
-m bench.divergence` counts such answers, and writes bench/results/divergence.json.
"""

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.runs import parser, write
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from tests.support.in_process_engine import submit

_ROOT = Path(__file__).resolve().parent.parent
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CROWD = 32


def main() -> None:
    options = parser(__doc__, "divergence")
    options.add_argument("--model", type=Path, default=_ROOT / "models" / "storyteller")
    options.add_argument("--sequences", type=int, default=96)
    options.add_argument("--tokens", type=int, default=100)
    arguments = options.parse_args()
    logging.disable(logging.WARNING)
    results = {
        dtype: asyncio.run(_measure(arguments.model, dtype, arguments.sequences, arguments.tokens)) for dtype in _DTYPES
    }
    write(arguments.out, {"model": arguments.model.name, "tokens": arguments.tokens, "diverged": results})
    for dtype, counts in results.items():
        print(dtype, *(f"{case}: {different} of {arguments.sequences}" for case, different in counts.items()), sep="  ")


async def _measure(folder: Path, dtype: str, sequences: int, tokens: int) -> dict[str, int]:
    """The number of sequences that differ from the one generated alone, by case."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype]).eval()
    engine = build_engine(folder.name, model, PredictorSettings(dtype=dtype, max_running=_CROWD))
    generator = random.Random(7)  # noqa: S311  # prompts, not secrets
    prompts = [
        [generator.randrange(3, engine.limits.vocabulary_size) for _ in range(generator.randrange(4, 60))]
        for _ in range(sequences)
    ]
    counts = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):

        def request(i: int, output_ids: list[int], temperature: float = temperature) -> Submission:
            sampling = SamplingParameters(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=i)
            # Salted, so that the cache of an earlier run is not reused.
            salted = sampling.model_copy(update={"cache_salt": str(generator.random())})
            salted_json = salted.model_dump_json().encode()
            return Submission(request_id=str(i), prompt_ids=prompts[i], sampling=salted_json, output_ids=output_ids)

        alone = [await _generate(engine, request(i, [])) for i in range(sequences)]
        crowd = await asyncio.gather(*(_generate(engine, request(i, [])) for i in range(sequences)))
        half = tokens // 2
        rest = await asyncio.gather(*(_generate(engine, request(i, alone[i][:half])) for i in range(sequences)))
        counts[f"{kind}, in a crowd"] = sum(a != b for a, b in zip(alone, crowd, strict=True))
        counts[f"{kind}, continued"] = sum(a[half:] != b for a, b in zip(alone, rest, strict=True))
    engine.close()
    return counts


async def _generate(engine: ContinuousBatchingEngine, request: Submission) -> list[int]:
    slot = submit(engine, request)
    ids: list[int] = []
    while True:
        chunk = await slot.read()
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            return ids


if __name__ == "__main__":
    main()
