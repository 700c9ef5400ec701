"""The cost of structured output: tokens a second of constrained answers beside unconstrained ones.

OpenAI's server-sent events through the whole stack as `make up` starts it, everything on by default, with 32 callers on
the whole machine: prompts of 32 tokens, 64 tokens out, greedy, the bundled model `storyteller`, whose steps are so
short that a mask has little time beside them. The schema is that of a list of persons, which 64 tokens do not complete,
so both cases have equally many tokens. In a round each case is measured once, in random order; the ratios are those of
pairs (bench/statistics.py).

`python -m bench.structured` writes bench/results/structured.json; three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import uvloop

from bench.completions import Callers
from bench.runs import machine, parser, running_stack, write
from bench.statistics import estimate, paired_ratios, quantile

_MODEL = "storyteller"
_NEW_TOKENS = 64
_PROMPT_IDS = range(10, 1500)
_WARM_UP_S = 1.0
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "books"]}, "maxItems": 3},
        "city": {"anyOf": [{"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}, {"type": "null"}]},
    },
    "required": ["name", "age", "likes", "city"],
    "additionalProperties": False,
}
_FREE, _CONSTRAINED = "free", "constrained"
_CASES: Mapping[str, Mapping[str, Any]] = {
    _FREE: {},
    _CONSTRAINED: {"structured_outputs": {"json": {"type": "array", "items": _PERSON, "minItems": 50}}},
}


def main() -> None:
    options = parser(__doc__, "structured")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=5.0, help="of a measurement, after one that is not counted")
    options.add_argument("--callers", type=int, default=32)
    given = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        measured = loop.run(_measure(given))
    ratio = estimate(paired_ratios(measured[_CONSTRAINED]["tokens_per_s"], measured[_FREE]["tokens_per_s"]))
    cases = {case: {name: round(median(values), 2) for name, values in measured[case].items()} for case in _CASES}
    report = {
        "machine": machine(),
        "model": _MODEL,
        "callers": given.callers,
        "new_tokens": _NEW_TOKENS,
        "rounds": given.rounds,
        "seconds": given.seconds,
        "cases": cases,
        "ratio": {name: round(value, 3) for name, value in asdict(ratio).items()},
    }
    write(given.out, report)
    for case, figures in cases.items():
        print(f"{case:12}" + "".join(f"{name} {value:<12}" for name, value in figures.items()))
    print(f"ratio of tokens_per_s {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


async def _measure(given: argparse.Namespace) -> Mapping[str, Mapping[str, list[float]]]:
    measured: Mapping[str, dict[str, list[float]]] = {case: defaultdict(list) for case in _CASES}
    async with running_stack(_MODEL) as stack:
        for number in range(-1, given.rounds):
            for case in random.sample(list(_CASES), len(_CASES)):
                figures = await _figures(stack.gateway, _CASES[case], given)
                if number >= 0:  # The first round warms up.
                    for name, value in figures.items():
                        measured[case][name].append(value)
    return measured


async def _figures(gateway: str, fields: Mapping[str, Any], given: argparse.Namespace) -> Mapping[str, float]:
    seed = random.randrange(1 << 30)  # noqa: S311  # Of prompts.
    callers = Callers(gateway, _MODEL, given.callers, _NEW_TOKENS, seed=seed, fields=fields, prompt_ids=_PROMPT_IDS)
    async with callers as calls:
        await calls.measure(_WARM_UP_S)
        load = await calls.measure(given.seconds)
    return {
        "tokens_per_s": load.tokens_per_s,
        "first_token_p50_ms": 1e3 * quantile(load.first_token_s, 0.5),
        "gap_p50_ms": 1e3 * quantile(load.gaps_s, 0.5),
        "gap_p99_ms": 1e3 * quantile(load.gaps_s, 0.99),
    }


if __name__ == "__main__":
    main()
