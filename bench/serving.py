"""The whole server beside vLLM's: OpenAI's server-sent events, on the whole machine together with the callers.

llama-10M in bfloat16 or in `--dtype` (see token_cost.py), prompts of 32 tokens, 64 tokens out, greedy, with 1, 8 and 32
callers, each of which sends its next request when an answer is complete. `headrace` is the stack as `make up` starts
it, everything on by default; `vllm` its CPU server with compiled graphs, the default, and `vllm-eager` without;
and `fronted` the stack before that server, everything on. All servers run all the time; in a round each is measured
once with each number of callers, in random order, so other load on the machine affects all. Figures are medians over
the rounds, ratios those of pairs (bench/statistics.py).

With `--apart` vLLM has the first half of the cores, as an engine that has a machine of its own, and the stack and the
callers have the others. On shared cores vLLM's scheduler and its worker wait for each other without sleeping
(`SpinCondition` in vLLM's shm_broadcast.py): on two cores whatever else runs, its own HTTP server too, has to wait for
slices of theirs.

The first run installs vLLM into its own environment: 2 to 5 minutes, 3 GB. `python -m bench.serving` writes
bench/results/serving.json; 8 minutes.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import uvloop

from bench.cases import HEADRACE, VLLM
from bench.completions import Callers
from bench.contenders import CONTENDERS, ROOT
from bench.processes import on_cores, roles, usage
from bench.runs import machine, parser, running_stack, write
from bench.statistics import estimate, paired_ratios, quantile
from bench.vllm_server import vllm_server

_STATE = ROOT / ".run" / "bench"
_MODEL = "llama-10M"
_VLLM_EAGER = "vllm-eager"
_FRONTED = "fronted"
_PEERS: dict[str, tuple[str, ...]] = {VLLM: (), _VLLM_EAGER: ("--enforce-eager",)}
_NEW_TOKENS = 64
_WARM_UP_S = 1.0
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # By our names, vLLM's.


class Server(NamedTuple):
    """A running server: its address and its processes."""

    address: str
    roots: Mapping[str, int]


# The figures of each combination of server and number of callers, one value for each round.
Rounds = dict[tuple[str, int], dict[str, list[float]]]


def main() -> None:
    options = parser(__doc__, "serving")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument(
        "--seconds", type=float, default=5.0, help="of a measurement, after a second that is not counted"
    )
    options.add_argument("--callers", type=int, nargs="+", default=(1, 8, 32))
    own = (HEADRACE, *_PEERS)
    options.add_argument("--servers", nargs="+", choices=(*own, _FRONTED), default=own)
    options.add_argument("--apart", action="store_true", help="vLLM has half of the cores, everything else the others")
    options.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the model's weights")
    arguments = options.parse_args()
    (_STATE / "logs").mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_STATE / "models")], cwd=ROOT, check=True)
    if set(arguments.servers) & _PEERS.keys() and (reason := CONTENDERS[VLLM].install()):
        raise SystemExit(reason)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        measured = loop.run(_measure(arguments))
    report = {
        "machine": machine(),
        "model": f"{_MODEL}, {arguments.dtype}",
        "apart": arguments.apart,
        "new_tokens": _NEW_TOKENS,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "callers": {str(callers): _report(measured, callers, arguments.servers) for callers in arguments.callers},
    }
    write(arguments.out, report)
    print(_table(report["callers"]))


async def _measure(arguments: argparse.Namespace) -> Rounds:
    measured: Rounds = defaultdict(lambda: defaultdict(list))
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2 if arguments.apart else 0
    async with AsyncExitStack() as opened:
        opened.enter_context(on_cores(set(cores[half:])))
        servers: dict[str, Server] = {}
        for name in sorted(arguments.servers, key=(_FRONTED).__eq__):  # After the server that it fronts.
            servers[name] = await _start(opened, name, arguments.dtype, servers.get(VLLM), cores[:half])
        cases = [(name, callers) for name in servers for callers in arguments.callers]
        for number in range(-1, arguments.rounds):
            for name, callers in random.sample(cases, len(cases)):
                try:
                    figures = await _figures(servers[name], callers, arguments.seconds)
                except Exception as error:
                    error.add_note(f"of {name}, with {callers} callers")
                    raise
                if number >= 0:  # The first round warms up.
                    for figure, value in figures.items():
                        measured[name, callers][figure].append(value)
    return measured


async def _start(opened: AsyncExitStack, name: str, dtype: str, engine: Server | None, cores: Sequence[int]) -> Server:
    """`engine` is the server that is fronted; `cores` are vLLM's own, if it has some."""
    folder = _STATE / "models" / _MODEL
    if name in _PEERS:
        log = _STATE / "logs" / f"serving-{name}.log"
        environment = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}
        starting = vllm_server(folder, _MODEL, log, *_PEERS[name], dtype=_DTYPES[dtype], environment=environment)
        with on_cores(set(cores) or os.sched_getaffinity(0)):
            server = await opened.enter_async_context(starting)
        return Server(server.address, {name: server.pid})
    models, roots = f"{_MODEL}={folder}", {}
    if name == _FRONTED:
        if engine is None:
            raise SystemExit(f"{_FRONTED} needs {VLLM}")
        models, roots = f"{_MODEL}=http://{engine.address}/v1#{_MODEL};tokenizer={folder}", dict(engine.roots)
    stack = await opened.enter_async_context(
        running_stack(models=models, environment={"predictor": {"PREDICTOR_DTYPE": dtype}})
    )
    return Server(stack.gateway, roots | {process: stack.pid(process) for process in stack.names})


async def _figures(server: Server, callers: int, seconds: float) -> Mapping[str, float]:
    processes = roles(server.roots)
    async with Callers(server.address, _MODEL, callers, _NEW_TOKENS, seed=random.randrange(1 << 30)) as calls:  # noqa: S311
        await calls.measure(_WARM_UP_S)
        before = usage(processes)
        load = await calls.measure(seconds)
        used = usage(processes).since(before)
    if not load.first_token_s or not load.gaps_s:
        raise RuntimeError("no answer began within a measurement: make it longer")
    return {
        "tokens_per_s": load.tokens_per_s,
        "first_token_p50_ms": 1e3 * quantile(load.first_token_s, 0.5),
        "first_token_p99_ms": 1e3 * quantile(load.first_token_s, 0.99),
        "gap_p50_ms": 1e3 * quantile(load.gaps_s, 0.5),
        "gap_p99_ms": 1e3 * quantile(load.gaps_s, 0.99),
        "tokens_a_piece": load.tokens / (len(load.gaps_s) + len(load.first_token_s)),
        "server_us_a_token": 1e6 * sum(used.processes.values()) / load.tokens,
    }


def _report(measured: Rounds, callers: int, servers: Sequence[str]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in servers:
        figures = measured[name, callers]
        report[name] = {figure: round(median(values), 2) for figure, values in figures.items()}
        report[name]["each_round"] = {
            figure: [round(value, 2) for value in values] for figure, values in figures.items()
        }
        for ours in set(servers) & {HEADRACE, _FRONTED} - {name}:
            ratio = estimate(paired_ratios(measured[ours, callers]["tokens_per_s"], figures["tokens_per_s"]))
            report[name][f"{ours}_tokens_per_s_ratio"] = {key: round(value, 3) for key, value in asdict(ratio).items()}
    return report


def _table(levels: Mapping[str, Mapping[str, Any]]) -> str:
    figures = {
        "tokens_per_s": "tokens/s",
        "first_token_p50_ms": "TTFT p50",
        "first_token_p99_ms": "TTFT p99",
        "gap_p50_ms": "gap p50",
        "gap_p99_ms": "gap p99",
        "tokens_a_piece": "tokens/read",
        "server_us_a_token": "µs/token",
    }
    lines = [f"{'callers':<10}{'server':<14}" + "".join(f"{name:>14}" for name in figures.values()) + "   ratios"]
    for callers, servers in levels.items():
        for name, row in servers.items():
            ratios = {ours: row.get(f"{ours}_tokens_per_s_ratio") for ours in (HEADRACE, _FRONTED)}
            text = "".join(
                f"   {ours} {one['median']} ({one['low']} to {one['high']})" for ours, one in ratios.items() if one
            )
            lines.append(f"{callers:<10}{name:<14}" + "".join(f"{row[key]:>14.1f}" for key in figures) + text)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
