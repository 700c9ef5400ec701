"""The cost of a tensor call, compared with peers: gRPC and JSON through a transformer to a predictor, and back.

The model returns its input (`stream`: 64 small answers to each request). Cases: `tok` 262 KB of token ids, 16 callers;
`tok-1` the same with one caller; `img` 2.4 MB of FP32; `tiny` 64 bytes; `stream` 16 streams. Contenders:

    headrace            the stack as `make up` starts it, everything on by default, called through the gateway
    headrace-processor  a model with a processor in the transformer, which passes everything on
    headrace-log-off    without the payload log
    headrace-trace-off  without traces: neither Envoy nor the services sample
    floor               Envoy with a minimal configuration before two bare grpc.aio servers (bench/floor_server.py)
    kserve-grpc         KServe's ModelServer as transformer and predictor, no gateway, the same allocator settings
    kserve-rest         the same with JSON
    triton              Triton's server with its Python backend: one hop

All servers run all the time; in a round each contender is measured once with each case, in random order, so other load
on the machine affects all. The callers are separate processes on the same machine, the same for all
(bench/tensor_client.py); every answer is compared with its request. Processor time is that of all processes of a
contender, including its use without calls (`idle_core_share`: the part of a core, measured before the rounds);
`client_share` is the part of a core that each of the callers' processes uses, which must stay below 1. Figures are
medians over the rounds, ratios those of pairs (bench/statistics.py).

The first run installs KServe and Triton into their own environments: 1 minute, 0.6 GB. `python -m bench.transport`
writes bench/results/transport.json; 20 minutes.
"""

import argparse
import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import uvloop

from bench.runs import machine, parser, write
from bench.statistics import estimate, paired_ratios, quantile
from bench.tensor_cases import CASES
from bench.tensor_client import Clients, Load, clients
from bench.transport_servers import CONTENDERS, HEADRACE, SERVERS, Server, idle_shares

_CLIENT_PROCESSES = 2
_SETTLE_S, _IDLE_S = 2.0, 5.0
_ATTEMPTS = 4  # Each is twice as long as the one before.


class Sample(NamedTuple):
    """One measurement: its figures, milliseconds of processor time a request by process, and failures by reason."""

    figures: dict[str, float]
    cpu_ms: dict[str, float]
    failures: dict[str, int]


# The samples of each case and contender, one for each round.
Samples = dict[tuple[str, str], list[Sample]]
# The part of a core that each server uses without calls.
Idle = dict[str, float]


def main() -> None:
    options = parser(__doc__, "transport")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--seconds", type=float, default=4.0, help="of a measurement, after half a second that is not counted"
    )
    options.add_argument("--only", nargs="+", choices=CONTENDERS, default=tuple(CONTENDERS), help="contenders")
    options.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    arguments = options.parse_args()
    absent = {name: reason for name in arguments.only if (reason := CONTENDERS[name].install())}
    names = [name for name in arguments.only if name not in absent]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        samples, idle = loop.run(_measure(arguments, names))
    report = {
        "machine": machine(),
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "absent": absent,
        "idle_core_share": {server: round(share, 4) for server, share in idle.items()},
        "cases": {case: _report(samples, case, names) for case in arguments.cases},
    }
    write(arguments.out, report)
    print(_table(report["cases"]))
    print("\nwithout calls, % of a core: ", ", ".join(f"{server} {100 * share:.1f}" for server, share in idle.items()))


async def _measure(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[Samples, Idle]:
    samples: Samples = defaultdict(list)
    async with AsyncExitStack() as opened:
        needed = dict.fromkeys(CONTENDERS[name].server for name in names)
        servers = {key: await opened.enter_async_context(SERVERS[key]()) for key in needed}
        load_clients = await opened.enter_async_context(clients(_CLIENT_PROCESSES))
        await asyncio.sleep(_SETTLE_S)
        idle = {name: sum(shares.values()) for name, shares in (await idle_shares(servers, _IDLE_S)).items()}
        pairs = [(case, name) for case in arguments.cases for name in names if case not in CONTENDERS[name].absent]
        for number in range(-1, arguments.rounds):
            for case, name in random.sample(pairs, len(pairs)):
                server = servers[CONTENDERS[name].server]
                # The first round warms up.
                seconds = arguments.seconds if number >= 0 else min(1.0, arguments.seconds)
                sample = await _sample(load_clients, server, name, case, seconds)
                if number >= 0:
                    samples[case, name].append(sample)
    return samples, idle


async def _sample(load_clients: Clients, server: Server, name: str, case: str, seconds: float) -> Sample:
    """One measurement, repeated for longer if no answer ends within it; raises RuntimeError if none ever does."""
    target = CONTENDERS[name].target(server, case)
    failures: Counter[str] = Counter()
    for attempt in range(_ATTEMPTS):
        length = seconds * 2**attempt
        load, used = await load_clients.measure_with_usage(target, case, server.roots, length)
        failures.update(load.failures)
        if load.took_s:
            return Sample(_figures(load, sum(used.values()), length), _each(used, len(load.took_s)), dict(failures))
    raise RuntimeError(f"{name}, {case}: no right answer within {length:g} s; failures: {dict(failures)}")


def _figures(load: Load, cpu_s: float, seconds: float) -> dict[str, float]:
    answers = len(load.took_s)
    figures = {
        "per_s": answers / seconds,
        "p50_ms": 1e3 * quantile(load.took_s, 0.5),
        "p99_ms": 1e3 * quantile(load.took_s, 0.99),
        "server_cpu_ms": 1e3 * cpu_s / answers,
        "client_share": load.client_cpu_s / seconds / _CLIENT_PROCESSES,
    }
    if load.first_s:
        figures["messages_per_s"] = load.messages / seconds
        figures["first_message_p50_ms"] = 1e3 * quantile(load.first_s, 0.5)
        figures["first_message_p99_ms"] = 1e3 * quantile(load.first_s, 0.99)
        figures["server_us_a_message"] = 1e6 * cpu_s / load.messages
    return figures


def _each(used: Mapping[str, float], answers: int) -> dict[str, float]:
    return {role: 1e3 * seconds / answers for role, seconds in used.items()}


def _report(samples: Samples, case: str, names: Sequence[str]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "callers": CASES[case].callers,
        "tensor_bytes": len(CASES[case].tensor),
        "absent": {name: CONTENDERS[name].absent[case] for name in names if case in CONTENDERS[name].absent},
        "contenders": {},
    }
    for name in names:
        if name in report["absent"]:
            continue
        series = _series(samples[case, name])
        row: dict[str, Any] = {figure: round(median(values), 3) for figure, values in series.items()}
        row["per_s_interval"] = _rounded(series["per_s"])
        row["server_cpu_ms_by_process"] = _by_process(samples[case, name])
        row["failures"] = dict(sum((Counter(sample.failures) for sample in samples[case, name]), Counter()))
        row["each_round"] = {figure: [round(value, 3) for value in values] for figure, values in series.items()}
        if name != HEADRACE and HEADRACE in names:
            ours = _series(samples[case, HEADRACE])
            for figure in ("per_s", "server_cpu_ms"):
                row[f"headrace_{figure}_ratio"] = _rounded(paired_ratios(ours[figure], series[figure]))
        report["contenders"][name] = row
    return report


def _series(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {figure: [sample.figures[figure] for sample in samples] for figure in samples[0].figures}


def _by_process(samples: Sequence[Sample]) -> dict[str, float]:
    every_role = sorted({role for sample in samples for role in sample.cpu_ms})
    return {role: round(median(sample.cpu_ms.get(role, 0.0) for sample in samples), 4) for role in every_role}


def _rounded(values: Sequence[float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in asdict(estimate(values)).items()}


def _table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for case, report in cases.items():
        streams = CASES[case].streams
        rate, first = ("messages_per_s", "first_message") if streams else ("per_s", "")
        columns = {rate: "messages/s" if streams else "requests/s"}
        columns |= {f"{first}_p50_ms": "TTFT p50", f"{first}_p99_ms": "TTFT p99"} if streams else {}
        columns |= {"p50_ms": "p50 ms", "p99_ms": "p99 ms"}
        columns |= {"server_us_a_message": "µs/message"} if streams else {"server_cpu_ms": "CPU ms"}
        columns |= {"client_share": "client"}
        lines.append(f"\n{case}: {report['tensor_bytes']} bytes, {report['callers']} callers")
        lines.append(f"{'':<20}" + "".join(f"{title:>12}" for title in columns.values()) + "   headrace / it")
        for name, row in report["contenders"].items():
            ratio = row.get("headrace_per_s_ratio")
            text = f"   {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
            failed = f"   failures: {row['failures']}" if row["failures"] else ""
            lines.append(f"{name:<20}" + "".join(f"{row[key]:>12.4g}" for key in columns) + text + failed)
        lines += [f"{name:<20}absent: {reason}" for name, reason in report["absent"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
