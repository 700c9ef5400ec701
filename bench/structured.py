"""The cost of structured output: tokens a second of constrained answers beside unconstrained ones.

OpenAI's server-sent events through the whole stack as `make up` starts it, everything on by default, with 32 callers on
the whole machine: prompts of 32 tokens, 64 tokens out, greedy, the bundled model `storyteller`, whose steps are so
short that a mask has little time beside them. The schema is that of a list of persons, which 64 tokens do not complete,
so both cases have equally many tokens; those that the schema forces are among them. In a round each case is measured
once, in random order; the ratios are those of pairs (bench/statistics.py).

`python -m bench.structured` writes bench/results/structured.json; three minutes.
"""

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import uvloop

from bench.completions import Connection
from bench.runs import machine, parser, running_stack, write
from bench.statistics import estimate, paired_ratios

_MODEL = "storyteller"
_NEW_TOKENS = 64
_PROMPT_IDS = range(10, 1500)
_PROMPT_TOKENS = 32
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
    options.add_argument("--answers", type=int, default=8, help="of each caller in a measurement (default 8)")
    options.add_argument("--callers", type=int, default=32)
    given = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        measured = loop.run(_measure(given))
    ratio = estimate(paired_ratios(measured[_CONSTRAINED], measured[_FREE]))
    report = {
        "machine": machine(),
        "model": _MODEL,
        "callers": given.callers,
        "new_tokens": _NEW_TOKENS,
        "rounds": given.rounds,
        "answers": given.answers,
        "tokens_per_s": {case: round(median(measured[case]), 1) for case in _CASES},
        "each_round": {case: [round(value, 1) for value in measured[case]] for case in _CASES},
        "ratio": {name: round(value, 3) for name, value in asdict(ratio).items()},
    }
    write(given.out, report)
    for case in _CASES:
        print(f"{case:12} {median(measured[case]):8.0f} tokens/s")
    print(f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


async def _measure(given: argparse.Namespace) -> Mapping[str, list[float]]:
    """Tokens a second of each case, one value for each round."""
    measured: dict[str, list[float]] = defaultdict(list)
    async with running_stack(_MODEL) as stack:
        for number in range(-1, given.rounds):
            for case in random.sample(list(_CASES), len(_CASES)):
                tokens_per_s = await _tokens_per_s(stack.gateway, _CASES[case], given)
                if number >= 0:  # The first round warms up.
                    measured[case].append(tokens_per_s)
    return measured


async def _tokens_per_s(gateway: str, fields: Mapping[str, Any], given: argparse.Namespace) -> float:
    """Of all callers together, each with so many answers one after the other."""
    began = time.perf_counter()
    tokens = await asyncio.gather(*(_call(gateway, fields, given.answers) for _ in range(given.callers)))
    return sum(tokens) / (time.perf_counter() - began)


async def _call(gateway: str, fields: Mapping[str, Any], answers: int) -> int:
    """The tokens of a caller's answers."""
    connection = await Connection.open(gateway)
    try:
        return sum([await connection.complete(_body(fields), lambda *_: None) for _ in range(answers)])
    finally:
        connection.close()


def _body(fields: Mapping[str, Any]) -> bytes:
    prompt = random.choices(_PROMPT_IDS, k=_PROMPT_TOKENS)  # noqa: S311  # No secret.
    request = {"model": _MODEL, "prompt": prompt, "max_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    events = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(request | events | fields).encode()


if __name__ == "__main__":
    main()
