"""A long prompt beside running streams: the time to its first token, and the gaps between tokens of the streams.

llama-10M in bfloat16 or in `--dtype` (see token_cost.py), 16 streams, prompts of 2,000 and 500 tokens, with several
values of PREDICTOR_MAX_GAP_MS. `engine`: the engine alone, one process for each value on the same core. `stack`:
through Envoy and the transformer, as OpenAI's server-sent events, on the whole machine with the callers. In each round
every value is measured once, in random order; figures are medians. `quiet` is the same round before the prompt, `alone`
the prompt without streams.

`python -m bench.long_prompt` writes bench/results/long_prompt.json; 10 minutes.
"""

import argparse
import asyncio
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from statistics import median
from typing import Any

import uvloop

from bench.cases import PROMPT_IDS
from bench.completions import Callers, Connection, Load, Stream
from bench.contenders import ROOT, Contender
from bench.runs import machine, parser, running_stack, write
from bench.statistics import quantile
from bench.worker_process import WorkerProcess
from tests.support.runner_stack import Stack

_STATE = ROOT / ".run" / "bench"
_MODEL = "llama-10M"
_STREAMS = 16
_NEW_TOKENS = 2500  # Enough for no stream to end before the prompt.
_SETTLE_S = 1.0
_QUIET_S = 2.0

# The figures of each combination of setting and length of the prompt, one value for each round.
Rounds = dict[tuple[float, int], dict[str, list[float]]]


def main() -> None:
    options = parser(__doc__, "long_prompt")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--gaps", type=float, nargs="*", default=(16, 20, 24, 30, 60), metavar="MS")
    options.add_argument("--stack-gaps", type=float, nargs="*", default=(16, 20, 24, 30, 60), metavar="MS")
    options.add_argument("--prompts", type=int, nargs="+", default=(2000, 500), metavar="TOKENS")
    options.add_argument("--dtype", default="bf16", help="of the model's weights: bf16, fp32")
    options.add_argument("--core", type=int, default=1, help="of the engine without a stack")
    arguments = options.parse_args()
    (_STATE / "logs").mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_STATE / "models")], cwd=ROOT, check=True)
    report = {
        "machine": machine(),
        "model": f"{_MODEL}, {arguments.dtype}",
        "streams": _STREAMS,
        "rounds": arguments.rounds,
    }
    if arguments.gaps:
        report["engine"] = _report(_measure_engine(arguments))
        print(_table("engine", report["engine"]), flush=True)
    if arguments.stack_gaps:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            report["stack"] = _report(loop.run(_measure_stack(arguments)))
        print(_table("stack", report["stack"]))
    write(arguments.out, report)


def _measure_engine(arguments: argparse.Namespace) -> Rounds:
    draw = random.Random(arguments.rounds)  # noqa: S311  # The same prompts at every run.
    measured: Rounds = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        workers = {}
        for gap_ms in arguments.gaps:
            contender = Contender("headrace_engine", (f"max_gap_ms={gap_ms}", f"dtype={arguments.dtype}"))
            log = _STATE / "logs" / f"long-prompt-{gap_ms:g}.log"
            workers[gap_ms] = WorkerProcess(contender, _STATE / "models" / _MODEL, log, arguments.core)
            stack.callback(workers[gap_ms].stop)
        for number in range(-1, arguments.rounds):
            for length in arguments.prompts:
                for gap_ms in draw.sample(arguments.gaps, len(arguments.gaps)):
                    figures = _ask(workers[gap_ms], draw, length)
                    if number >= 0:  # The first round warms up.
                        _add(measured[gap_ms, length], figures)
    return measured


def _ask(worker: WorkerProcess, draw: random.Random, length: int) -> Mapping[str, float]:
    alone = worker.ask("generate", batches=[[draw.choices(PROMPT_IDS, k=length)]], new_tokens=1)
    figures = worker.ask(
        "long_prompt",
        prompts=[draw.choices(PROMPT_IDS, k=32) for _ in range(_STREAMS)],
        long_prompt=draw.choices(PROMPT_IDS, k=length),
        new_tokens=_NEW_TOKENS,
    )
    return {**figures, "alone_ms": 1e3 * alone["first_token_s"][0]}


async def _measure_stack(arguments: argparse.Namespace) -> Rounds:
    draw = random.Random(arguments.rounds)  # noqa: S311
    measured: Rounds = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as opened:
        stacks: dict[float, Stack] = {}
        for gap_ms in arguments.stack_gaps:
            environment = {"PREDICTOR_DTYPE": arguments.dtype, "PREDICTOR_MAX_GAP_MS": str(gap_ms)}
            stacks[gap_ms] = await opened.enter_async_context(
                running_stack(models=f"{_MODEL}={_STATE / 'models' / _MODEL}", environment={"predictor": environment})
            )
        for number in range(-1, arguments.rounds):
            for length in arguments.prompts:
                for gap_ms in draw.sample(list(stacks), len(stacks)):
                    figures = await _call(stacks[gap_ms], draw, length)
                    if number >= 0:
                        _add(measured[gap_ms, length], figures)
    return measured


async def _call(stack: Stack, draw: random.Random, length: int) -> Mapping[str, float]:
    connection = await Connection.open(stack.gateway)
    try:
        alone = await _first_token_s(connection, draw, length)
        async with Callers(stack.gateway, _MODEL, _STREAMS, _NEW_TOKENS, seed=draw.randrange(1 << 30)) as callers:
            await callers.measure(_SETTLE_S)
            quiet = await callers.measure(_QUIET_S)
            prompt = asyncio.create_task(_first_token_s(connection, draw, length))
            busy = await callers.measure_during(prompt)
            callers.abandon()
    finally:
        connection.close()
    return {
        "first_token_ms": 1e3 * prompt.result(),
        "gap_p50_ms": 1e3 * quantile(busy.gaps_s, 0.5),
        "gap_p99_ms": 1e3 * quantile(busy.gaps_s, 0.99),
        "tokens_per_s": busy.tokens_per_s,
        "quiet_p50_ms": 1e3 * quantile(quiet.gaps_s, 0.5),
        "quiet_p99_ms": 1e3 * quantile(quiet.gaps_s, 0.99),
        "quiet_tokens_per_s": quiet.tokens_per_s,
        "alone_ms": 1e3 * alone,
    }


async def _first_token_s(connection: Connection, draw: random.Random, length: int) -> float:
    """The time to the first token of a prompt; returns after the second, when the streams' gaps are complete."""
    load = Load()
    await Stream(draw.choices(PROMPT_IDS, k=length), 2, _MODEL, lambda: load).run(connection)
    return load.first_token_s[0]


def _add(rounds: dict[str, list[float]], figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        rounds[name].append(value)


def _report(measured: Rounds) -> list[dict[str, Any]]:
    return [
        {
            "prompt_tokens": length,
            "max_gap_ms": gap_ms,
            **{name: round(median(values), 1) for name, values in figures.items()},
            "gap_p99_growth": round(_growth(figures["gap_p99_ms"], figures["quiet_p99_ms"]), 2),
            "each_round": {name: [round(value, 1) for value in values] for name, values in figures.items()},
        }
        for (gap_ms, length), figures in sorted(measured.items(), key=lambda item: (-item[0][1], item[0][0]))
    ]


def _growth(busy: Sequence[float], quiet: Sequence[float]) -> float:
    """The median over the rounds of the busy gap relative to the quiet one."""
    return median(b / q for b, q in zip(busy, quiet, strict=True))


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "prompt_tokens": "prompt",
        "max_gap_ms": "max gap",
        "first_token_ms": "TTFT ms",
        "gap_p50_ms": "gap p50",
        "gap_p99_ms": "gap p99",
        "tokens_per_s": "tokens/s",
        "quiet_p50_ms": "quiet p50",
        "quiet_p99_ms": "quiet p99",
        "quiet_tokens_per_s": "tokens/s",
        "gap_p99_growth": "growth",
        "alone_ms": "alone ms",
    }
    lines = [title, "".join(f"{name:>10}" for name in columns.values())]
    lines += ["".join(f"{row[key]:>10g}" for key in columns) for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
