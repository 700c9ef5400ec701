"""The cost of adapters (LoRA): tokens a second of the engine with 32 callers of the base, of one adapter, and of four.

The adapters have rank 16 and change every linear layer of the decoder. A caller has one request after another, 32
tokens in, 64 out, greedy, of random ids. A round measures each case once, in random order, in one process with one
thread, random weights in float32 and every setting by default. `without` has no adapter loaded. Seconds are those of
the process's processor time, callers included, so that other processes of the machine hardly matter.

`python -m bench.adapters` writes bench/results/adapters.json; four minutes.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from bench.architectures import CONFIGS
from bench.runs import machine, parser, write
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.adapters import linear_shapes
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from tests.support.in_process_engine import submit

_RANDOM = random.Random(1)  # noqa: S311
_MODELS = ("llama-10M", "OPT-125M")
_CALLERS, _ADAPTERS, _RANK = 32, 4, 16
_PROMPT_TOKENS, _TOKENS = 32, 64
_WARM_UP_S = 2.0
_CASES = {"base": (0,), "one adapter": (1,), "four adapters": (1, 2, 3, 4)}


def main() -> None:
    options = parser(__doc__, "adapters")
    options.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    options.add_argument("--seconds", type=float, default=8.0, help="of each case (default 8)")
    given = options.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine(), "callers": _CALLERS, "rank": _RANK}
    for name in _MODELS:
        figures = asyncio.run(_measure_all(name, given.rounds, given.seconds))
        report[name] = {case: round(median(rates)) for case, rates in figures.items()}
        for case, rate in report[name].items():
            print(f"{name:10} {case:14} {rate:6} tokens/s, {rate / report[name]['base']:.2f} of the base")
    write(given.out, report)


async def _measure_all(name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    rates: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        for number in range(1, _ADAPTERS + 1):
            _save_adapter(Path(folder) / str(number), model)
        engine = build_engine(name, model, PredictorSettings(max_context=512))
        try:
            for _ in range(rounds):
                rates["without"].append(await _rate(engine, (0,), seconds))
            if engine.adapters is None:
                raise RuntimeError(f"the runner of {name} supports no adapters")
            for number in range(1, _ADAPTERS + 1):
                engine.adapters.load(number, Path(folder) / str(number))
            for _ in range(rounds):
                for case in _RANDOM.sample(list(_CASES), len(_CASES)):
                    rates[case].append(await _rate(engine, _CASES[case], seconds))
        finally:
            engine.close()
    return {case: rates[case] for case in ("without", *_CASES)}


def _save_adapter(folder: Path, model: Any) -> None:
    tensors = {}
    for path, (inputs, outputs) in linear_shapes(model).items():
        for side, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = 0.02 * torch.randn(shape)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}))


async def _rate(engine: ContinuousBatchingEngine, adapters: tuple[int, ...], seconds: float) -> float:
    """Tokens a second of processor time, of callers that are spread over these adapters, after a warm-up."""
    callers = [asyncio.create_task(_repeat(engine, adapters[i % len(adapters)])) for i in range(_CALLERS)]
    try:
        await asyncio.sleep(_WARM_UP_S)
        before, began = engine.statistics.tokens, time.process_time()
        await asyncio.sleep(seconds)
        return (engine.statistics.tokens - before) / (time.process_time() - began)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        while engine.load.running or engine.load.waiting:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.01)


async def _repeat(engine: ContinuousBatchingEngine, adapter: int) -> None:
    while True:
        prompt = [_RANDOM.randrange(10, 1000) for _ in range(_PROMPT_TOKENS)]
        sampling = SamplingParameters(max_tokens=_TOKENS, temperature=0.0, seed=1, chunk_ms=1000)
        slot = submit(
            engine,
            Submission(
                request_id="bench", prompt_ids=prompt, sampling=sampling.model_dump_json().encode(), adapter=adapter
            ),
        )
        try:
            while (await slot.read()).finish_reason is None:
                pass
        finally:
            slot.cancel()


if __name__ == "__main__":
    main()
