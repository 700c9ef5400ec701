"""What one forward pass for all rows gives: tokens a second of families of models, and of the same one row at a time.

The families of bench/architectures.py, float32, one thread, each setting by default; a step of recurrent layers is
ours (mamba.py) in both engines. All callers send a request at once, 32 tokens in, 64 out, greedy, of random ids, and
are measured until the last one has its answer: a part of that would have another share of prompts than of outputs. Both
engines of a family are in one process; a round measures each case with both, one after the other, in random order.
Seconds are those of the process's processor time, callers included, so that other processes of the machine hardly
matter.

`python -m bench.families` writes bench/results/families.json; over two minutes for each family. `--only` measures
some families and keeps what the file has of the others.
"""

import asyncio
import json
import random
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from bench.architectures import FAMILIES, untrained
from bench.runs import machine, parser, write
from bench.statistics import estimate, paired_ratios
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from tests.support.in_process_engine import submit

_RANDOM = random.Random(1)  # noqa: S311
_STREAMS = (1, 8)
_PROMPT_TOKENS, _TOKENS, _WARM_UP_TOKENS = 32, 64, 2


def main() -> None:
    options = parser(__doc__, "families")
    options.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    options.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="families (default all)")
    given = options.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    report = {name: kept[name] for name in FAMILIES if name in kept}
    for name in given.only:
        report[name] = asyncio.run(_measure(name, given.rounds))
        for case, found in report[name]["ratios"].items():
            print(
                f"{name:12} {case:10} {found['median']:.2f} times as many ({found['low']:.2f} to {found['high']:.2f})"
            )
        write(given.out, {"machine": machine(), "rounds": given.rounds, **report})


async def _measure(name: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = untrained(name, torch.float32).eval()
    size = model.num_parameters()
    rates: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        # One row first: the other runner packs the weights.
        with patch.object(Proof, "_fault", lambda *_: "measured"):
            engines = {"one row": _engine(name, model, stack)}
        again = untrained(name, torch.float32).eval()
        again.load_state_dict(model.state_dict())
        together = _engine(name, again, stack)
        engines[together.description["runner"]] = together
        cases = [(engine, streams) for engine in engines for streams in _STREAMS]
        for engine, streams in cases:
            await _rate(engines[engine], streams, _WARM_UP_TOKENS)
        for _ in range(rounds):
            for engine, streams in _RANDOM.sample(cases, len(cases)):
                own = rates.setdefault(engine, {}).setdefault(f"{streams} streams", [])
                own.append(await _rate(engines[engine], streams, _TOKENS))
    before, after = rates["one row"], rates[together.description["runner"]]
    ratios = {case: estimate(paired_ratios(after[case], before[case])) for case in before}
    return {
        "parameters": size,
        "tokens_per_cpu_s": rates,
        "ratios": {case: {"median": one.median, "low": one.low, "high": one.high} for case, one in ratios.items()},
    }


def _engine(name: str, model: Any, stack: ExitStack) -> ContinuousBatchingEngine:
    model.generation_config.eos_token_id = None
    engine = build_engine(name, model, PredictorSettings(max_context=512))
    stack.callback(engine.close)
    return engine


async def _rate(engine: ContinuousBatchingEngine, streams: int, tokens: int) -> float:
    """Tokens a second of processor time."""
    began = time.process_time()
    await asyncio.gather(*(_answer(engine, tokens) for _ in range(streams)))
    return streams * tokens / (time.process_time() - began)


async def _answer(engine: ContinuousBatchingEngine, tokens: int) -> None:
    prompt = [_RANDOM.randrange(10, 1000) for _ in range(_PROMPT_TOKENS)]
    sampling = SamplingParameters(max_tokens=tokens, temperature=0.0, seed=1, chunk_ms=1000)
    slot = submit(
        engine, Submission(request_id="bench", prompt_ids=prompt, sampling=sampling.model_dump_json().encode())
    )
    while (await slot.read()).finish_reason is None:
        pass


if __name__ == "__main__":
    main()
