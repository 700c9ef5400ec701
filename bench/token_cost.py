"""The cost of a streamed token: microseconds of processor time by process, by thread and by cause.

OpenAI's server-sent events through the whole stack as `make up` starts it, everything on by default, with 1, 8 and 32
callers: prompts of 32 tokens, 64 tokens out, greedy. `llama-10M` is that model in bfloat16, or in `--dtype`: a
processor without instructions for bfloat16 needs 20 times as long for it. `free` is the same with a runner that
computes nothing, which shows the capacity of the path of tokens. Both stacks run all the time; in a round each
of them is measured once with each number of callers, in random order. Figures are medians over the rounds. Before the
first one the KV cache, of 256 MiB, has been written once: until then its pages are allocated, which costs 17 µs a
token with this model.

Processes are those of the stack and all their descendants, by role (bench/processes.py); the callers' own process is
left out. `forward` is the processor time of the model's forward passes on the engine's thread, a part of the
predictor's; `outside` everything else. A thread is listed if it takes at least `--least` µs a token. With `--flames
FOLDER` a last round, which is not counted, records each Python process with py-spy.

`python -m bench.token_cost` writes bench/results/token_cost.json; 5 minutes.
"""

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from bench import forward_times
from bench.completions import Callers
from bench.contenders import ROOT
from bench.processes import NAMED_THREADS, Thread, roles, usage
from bench.runs import machine, parser, running_stack, write
from bench.statistics import quantile
from tests.support.runner_stack import Stack

_MODELS_FOLDER = ROOT / ".run" / "bench" / "models"
_MODEL = "llama-10M"
_FREE = "free"
_NEW_TOKENS = 64
_WARM_UP_S = 1.0
_CACHE, _CACHE_TOKENS = "256MiB", 26_000  # The tokens of all its blocks are fewer.


class Server(NamedTuple):
    """A running stack and the file of its predictor's forward times."""

    stack: Stack
    forward_times: Path


class Sample(NamedTuple):
    """One measurement; times in microseconds of processor time for each token."""

    tokens_per_s: float
    first_token_ms: float
    gap_ms: float
    batch: float  # Tokens for each step.
    processes: dict[str, float]
    threads: dict[Thread, float]
    forward: float
    forward_wall: float

    @property
    def total(self) -> float:
        return sum(self.processes.values())


Samples = dict[tuple[str, int], list[Sample]]


def main() -> None:
    options = parser(__doc__, "token_cost")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=4.0, help="of a measurement, after a second of warm-up")
    options.add_argument("--callers", type=int, nargs="+", default=(1, 8, 32))
    options.add_argument("--dtype", default="bf16", help="of the model's weights: bf16, fp32")
    options.add_argument("--models", "--model", nargs="+", choices=(_MODEL, _FREE), default=(_MODEL, _FREE))
    options.add_argument("--least", type=float, default=3.0, metavar="µs", help="threads below this are not listed")
    options.add_argument("--flames", type=Path, metavar="FOLDER", help="py-spy's flame graphs of every process")
    arguments = options.parse_args()
    if arguments.flames:
        if shutil.which("py-spy") is None:
            options.error("--flames needs py-spy: pip install py-spy")
        arguments.flames.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_MODELS_FOLDER)], cwd=ROOT, check=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        samples = loop.run(_measure(arguments))
    report = {
        "machine": machine(),
        "new_tokens": _NEW_TOKENS,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "models": {model: _report(samples, model, arguments.callers) for model in arguments.models},
    }
    write(arguments.out, report)
    for model in arguments.models:
        print(_table(model, report["models"][model], arguments.least))


async def _measure(arguments: argparse.Namespace) -> Samples:
    samples: Samples = defaultdict(list)
    async with AsyncExitStack() as opened:
        servers = {
            model: await opened.enter_async_context(_server(model, arguments.dtype)) for model in arguments.models
        }
        for server in servers.values():
            await _write_cache(server)
        cases = [(model, callers) for model in arguments.models for callers in arguments.callers]
        for _ in range(arguments.rounds):
            for model, callers in random.sample(cases, len(cases)):
                samples[model, callers].append(await _sample(servers[model], callers, arguments.seconds))
        if arguments.flames:
            for model, server in servers.items():
                await _record_flames(model, server, max(arguments.callers), arguments.flames)
    return samples


@asynccontextmanager
async def _server(model: str, dtype: str) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "forward-times"
        predictor = {
            "PREDICTOR_DTYPE": dtype,
            "PREDICTOR_KV_CACHE_MEMORY": _CACHE,
            forward_times.VARIABLE: str(times),
        }
        if model == _FREE:
            predictor |= {"FREE": "1", "PACE_MS": "0"}
        async with running_stack(
            predictor="timed_predictor",
            models=f"{_MODEL}={_MODELS_FOLDER / _MODEL}",
            environment={
                "predictor": NAMED_THREADS | predictor,
                "transformer": NAMED_THREADS,
                "logger": NAMED_THREADS,
            },
        ) as stack:
            yield Server(stack, times)


async def _write_cache(server: Server) -> None:
    """Lets each block of the KV cache be written once."""
    tokens = 0
    async with Callers(server.stack.gateway, _MODEL, 32, _NEW_TOKENS) as calls:
        while tokens < _CACHE_TOKENS:
            tokens += (await calls.measure(_WARM_UP_S)).tokens


async def _sample(server: Server, callers: int, seconds: float) -> Sample:
    processes = _processes(server.stack)
    async with Callers(server.stack.gateway, _MODEL, callers, _NEW_TOKENS, seed=random.randrange(1 << 30)) as calls:  # noqa: S311
        await calls.measure(_WARM_UP_S)
        before, passes_before = usage(processes), forward_times.read(server.forward_times)
        load = await calls.measure(seconds)
        used, passes = usage(processes).since(before), forward_times.read(server.forward_times)
    if not load.tokens:
        raise RuntimeError("no token came within a measurement: make it longer")
    each = 1e6 / load.tokens
    return Sample(
        load.tokens_per_s,
        1e3 * quantile(load.first_token_s, 0.5),
        1e3 * quantile(load.gaps_s, 0.5),
        load.tokens / max(1, passes.steps - passes_before.steps),
        {role: each * spent for role, spent in used.processes.items()},
        {thread: each * spent for thread, spent in used.threads.items()},
        each * (passes.cpu_s - passes_before.cpu_s),
        each * (passes.wall_s - passes_before.wall_s),
    )


def _processes(stack: Stack) -> Mapping[int, str]:
    return roles({name: stack.pid(name) for name in stack.names})


async def _record_flames(model: str, server: Server, callers: int, folder: Path) -> None:
    options = ("--native", "--threads", "--duration", "5", "--rate", "200", "--format", "flamegraph")
    async with Callers(server.stack.gateway, _MODEL, callers, _NEW_TOKENS) as calls:
        await calls.measure(_WARM_UP_S)
        for pid, role in _processes(server.stack).items():
            output = folder / f"{model}-{role.replace('/', '-')}-{pid}.svg"
            recorder = await asyncio.create_subprocess_exec(
                *("py-spy", "record", *options, "--pid", str(pid), "--output", str(output)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            await calls.measure_during(asyncio.create_task(recorder.wait()))


def _report(samples: Samples, model: str, levels: Sequence[int]) -> dict[str, Any]:
    return {str(callers): _figures(samples[model, callers]) for callers in levels}


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    def middle(values: Sequence[float]) -> float:
        return round(median(values), 1)

    every_role = sorted({role for sample in samples for role in sample.processes})
    every_thread = sorted({thread for sample in samples for thread in sample.threads})
    threads: dict[str, dict[str, float]] = {role: {} for role in every_role}
    for thread in every_thread:
        threads[thread.role][thread.name] = middle([sample.threads.get(thread, 0.0) for sample in samples])
    return {
        "tokens_per_s": middle([sample.tokens_per_s for sample in samples]),
        "tokens_per_s_each_round": [round(sample.tokens_per_s, 1) for sample in samples],
        "first_token_ms": middle([sample.first_token_ms for sample in samples]),
        "gap_ms": middle([sample.gap_ms for sample in samples]),
        "tokens_a_step": middle([sample.batch for sample in samples]),
        "us_a_token": {
            "processes": {role: middle([sample.processes.get(role, 0.0) for sample in samples]) for role in every_role},
            "threads": threads,
            "total": middle([sample.total for sample in samples]),
            "forward": middle([sample.forward for sample in samples]),
            "forward_wall": middle([sample.forward_wall for sample in samples]),
            "outside": middle([sample.total - sample.forward for sample in samples]),
        },
    }


def _table(model: str, levels: Mapping[str, Mapping[str, Any]], least_us: float) -> str:
    def row(name: str, values: Sequence[float]) -> str:
        return f"{name:<36}" + "".join(f"{value:>12.1f}" for value in values)

    costs = [level["us_a_token"] for level in levels.values()]
    lines = [f"\n{model:<36}" + "".join(f"{callers + ' callers':>12}" for callers in levels)]
    for figure in ("tokens_per_s", "first_token_ms", "gap_ms", "tokens_a_step"):
        lines.append(row(figure, [level[figure] for level in levels.values()]))
    lines.append("µs a token")
    for role in costs[0]["processes"]:
        lines.append(row(f"  {role}", [cost["processes"].get(role, 0.0) for cost in costs]))
        for thread in sorted({name for cost in costs for name in cost["threads"].get(role, {})}):
            values = [cost["threads"].get(role, {}).get(thread, 0.0) for cost in costs]
            if max(values) >= least_us:
                lines.append(row(f"    {thread}", values))
    for figure in ("total", "forward", "outside"):
        lines.append(row(f"  {figure}", [cost[figure] for cost in costs]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
