"""Whether answers are the same alone, in a crowd, in chunks, continued and by recorded passes, on this device.

A crowd is 16 streams, every other one greedy and the rest with seeds, which arrive while earlier ones run. Which
comparison is a promise, by device and dtype: docs/gpu.md. That greedy tokens are the likeliest by transformers' own
logits, but for rounding, is one everywhere.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.errors import StartupError
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from tests.gpu.report import Report, part_options
from tests.model.random_crowd import PROMPTS, random_engines, read_all, request
from tests.support.in_process_engine import submit
from tests.waiting import until
from tests.zoo import FAMILIES, VOCABULARY

Answers = list[list[int]]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# By how much a token's logit may be below the highest: transformers rounds elsewhere.
_ROUNDING = {"fp32": 1e-3, "bf16": 0.3}
_PROMPTS = [*PROMPTS, *([(31 * j + n) % (VOCABULARY - 3) + 3 for j in range(n)] for n in (100, 128, 129, 200))]
_NEW_TOKENS = 24
_SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1}
_LIMITS = {"max_running": len(_PROMPTS), "max_context": 240}
_ROOM, _LITTLE_ROOM = 32 * 256, 3 * 256  # Tokens of a cache.
# On a GPU, heads as large as real ones.
_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def main() -> None:
    options = part_options()
    measure(options.device, Report(options.report))


def measure(device: str, report: Report, dtypes: Sequence[str] = tuple(_DTYPES)) -> None:
    """Compares all answers of the device in these dtypes, on CUDA without and with PREDICTOR_EXACT."""
    (family,) = (family for family in FAMILIES if family.name == "Qwen 3")
    family = replace(family, given=family.given | (_LARGE if device == "cuda" else {}))
    if device == "cpu":
        report.note("not compared: recorded passes and PREDICTOR_EXACT, which only CUDA has")
    for dtype in dtypes:
        model = family.model().to(device, _DTYPES[dtype])
        _compare(model, dtype, report, {"device": device}, binds=(device, dtype) == ("cpu", "fp32"))
        if device == "cuda":
            try:
                for weights in ("auto", "int8") if dtype == "bf16" else ("auto",):
                    given = {"device": device, "exact": True, "weights": weights}
                    _compare(model, f"{dtype}, exact, {weights}", report, given, binds=True)
            except StartupError as error:  # Such as: Triton does not run.
                report.promise(f"{dtype}, exact: an engine starts: {error}", 0, 1)


def _compare(model: Any, setting: str, report: Report, given: dict[str, Any], *, binds: bool) -> None:
    def run(
        load: Callable[[ContinuousBatchingEngine], Awaitable[Answers]], cache_tokens: int = _ROOM, **own: Any
    ) -> Answers:
        """The answers to a load by a new engine, which has nothing in its cache."""
        with random_engines() as make:
            engine = make(model, cache_tokens, **{"step_tokens": 2048, **_LIMITS, **given, **own})
            return asyncio.run(load(engine))  # type: ignore[arg-type]

    def count(name: str, answers: Answers, wanted: Answers) -> None:
        same = sum(a == b for a, b in zip(answers, wanted, strict=True))
        report.promise(f"{setting}: {name}", same, len(wanted), binds=binds)

    alone = run(_alone)
    found, tokens = _likeliest(model, alone, _ROUNDING[setting[:4]])
    is_own = given.get("weights") != "int8"  # Random models have other answers with other weights.
    report.promise(f"{setting}: tokens that transformers finds likeliest", found, tokens, binds=is_own)
    crowd = run(_crowd)
    count("in a crowd as alone", crowd, alone)
    count("in chunks, with a small cache, as alone", run(_crowd, _LITTLE_ROOM, step_tokens=32), alone)
    count("continued from the middle as alone", run(partial(_continued, whole=alone)), alone)
    if given["device"] == "cuda":
        count("recorded passes as direct ones", run(_crowd, cuda_graphs=False), crowd)


def _request(i: int, begun: Sequence[int] = ()) -> Any:
    return request(str(i), _PROMPTS[i], _NEW_TOKENS, begun, **(_SEEDED | {"seed": i} if i % 2 else {}))


async def _alone(engine: ContinuousBatchingEngine) -> Answers:
    return [await read_all(submit(engine, _request(i))) for i in range(len(_PROMPTS))]


async def _crowd(engine: ContinuousBatchingEngine) -> Answers:
    """Every third stream has begun before the next one arrives."""
    readers = []
    for i in range(len(_PROMPTS)):
        slot = submit(engine, _request(i))
        readers.append(asyncio.create_task(read_all(slot)))
        if i % 3 == 0:
            await until(lambda slot=slot: slot.timeline.first_token is not None)
    return list(await asyncio.gather(*readers))


async def _continued(engine: ContinuousBatchingEngine, whole: Answers) -> Answers:
    begun = [answer[: 1 + i % (_NEW_TOKENS - 1)] for i, answer in enumerate(whole)]
    slots = [submit(engine, _request(i, start)) for i, start in enumerate(begun)]
    return [start + await read_all(slot) for start, slot in zip(begun, slots, strict=True)]


@torch.inference_mode()
def _likeliest(model: Any, answers: Answers, rounding: float) -> tuple[int, int]:
    """How many tokens of the greedy answers transformers finds likeliest, but for rounding, and of how many."""
    found = tokens = 0
    for prompt, answer in list(zip(_PROMPTS, answers, strict=True))[::2]:
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # The requests allow no end token.
        logits[:, model.generation_config.eos_token_id] = -torch.inf
        found += int((chosen >= logits.max(1).values - rounding).sum())
        tokens += len(answer)
    return found, tokens


if __name__ == "__main__":
    main()
