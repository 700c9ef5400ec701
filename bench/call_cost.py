"""The cost of a call: microseconds of processor time of a `ModelInfer` of 64 bytes, by process and by cause.

Stacks that differ in one thing each, running at the same time. The first is as `make up` starts it, everything on by
default; each of the others leaves out one thing more than the one before it:

    default         everything on
    payload log     TRANSFORMER_PAYLOAD_LOG=off
    access log      the gateway sends no line for each call to the logger
    service spans   OTEL_TRACES_SAMPLER=always_off in the services; ids of traces continue
    gateway spans   GATEWAY_TRACE_PERCENT=0
    metrics         OTEL_SDK_DISABLED=true in the services: neither metrics nor ids of traces
    log lines       *_LOG_LEVEL=WARNING: no line for each call
    floor           the rest of Headrace: what remains is Envoy and two bare servers (bench/floor_server.py)

In a round each is measured once, in random order, with 16 callers (bench/tensor_client.py). The processor time that
a stack's processes use without calls, measured before, is subtracted. The cost of a feature is the median difference
between a stack and the one before it, of the same round, with its 95 % interval. `parts` are single pieces of a
service's code, measured alone in one thread (bench/call_parts.py).

`python -m bench.call_cost` writes bench/results/call_cost.json; 7 minutes, 8 GB of memory.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import uvloop

from bench.call_parts import parts
from bench.runs import machine, parser, running_stack, write
from bench.statistics import estimate
from bench.tensor_cases import CASES
from bench.tensor_client import GRPC, Clients, Target, clients
from bench.transport_servers import SERVERS, Server, idle_shares
from headrace_runner.envoy_config import Config

_CASE = "tiny"
_MODEL = "echo"
_FLOOR = "floor"
_KINDS = ("transformer", "predictor", "logger")
_CLIENT_PROCESSES = 2
_SETTLE_S, _IDLE_S = 2.0, 5.0
_ACCESS_LOG = "envoy.access_loggers.open_telemetry"

# The additional omissions of each stack: settings of the services, and arguments of `running_stack`.
_STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "payload log": {"transformer": {"TRANSFORMER_PAYLOAD_LOG": "off"}},
    "access log": {"stack": {"change_gateway": lambda config: _drop_access_log(config)}},
    "service spans": {kind: {"OTEL_TRACES_SAMPLER": "always_off"} for kind in _KINDS},
    "gateway spans": {"stack": {"gateway_trace_percent": 0}},
    "metrics": {kind: {"OTEL_SDK_DISABLED": "true"} for kind in _KINDS},
    "log lines": {kind: {f"{kind.upper()}_LOG_LEVEL": "WARNING"} for kind in _KINDS},
}


class Sample(NamedTuple):
    """One measurement: calls a second, and microseconds of processor time of a call by role."""

    per_s: float
    cpu_us: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.cpu_us.values())


Samples = dict[str, list[Sample]]


def main() -> None:
    options = parser(__doc__, "call_cost")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument(
        "--seconds", type=float, default=2.0, help="of a measurement, after half a second that is not counted"
    )
    arguments = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        of_code = loop.run(parts())
        samples = loop.run(_measure(arguments))
    report = {
        "machine": machine(),
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "callers": CASES[_CASE].callers,
        "without": _report(samples),
        "parts_us": {name: round(spent, 1) for name, spent in of_code.items()},
    }
    write(arguments.out, report)
    print(_table(report))


async def _measure(arguments: argparse.Namespace) -> Samples:
    samples: Samples = defaultdict(list)
    async with AsyncExitStack() as opened:
        servers = {}
        for number, name in enumerate(_STEPS):
            steps = list(_STEPS.values())[: number + 1]
            servers[name] = await opened.enter_async_context(_stack(steps))
        servers[_FLOOR] = await opened.enter_async_context(SERVERS[_FLOOR]())
        load_clients = await opened.enter_async_context(clients(_CLIENT_PROCESSES))
        await asyncio.sleep(_SETTLE_S)
        idle = await idle_shares(servers, _IDLE_S)
        for number in range(-1, arguments.rounds):
            for name in random.sample(tuple(servers), len(servers)):
                sample = await _sample(load_clients, servers[name], idle[name], arguments.seconds)
                if number >= 0:  # The first round warms up.
                    samples[name].append(sample)
    return samples


@asynccontextmanager
async def _stack(steps: Sequence[Mapping[str, Mapping[str, Any]]]) -> AsyncIterator[Server]:
    """A stack without the features that the steps name."""
    environment: dict[str, dict[str, Any]] = defaultdict(dict)
    for step in steps:
        for kind, values in step.items():
            environment[kind] |= values
    overrides = environment.pop("stack", {})
    async with running_stack(models=f"{_MODEL}=models/identity", environment=environment, **overrides) as stack:
        yield Server(stack.gateway, {name: stack.pid(name) for name in stack.names})


def _drop_access_log(config: Config) -> None:
    """Removes the access log for the logger."""
    for listener in config["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for each in chain["filters"]:
                logs = each["typed_config"].get("access_log", [])
                each["typed_config"]["access_log"] = [log for log in logs if log["name"] != _ACCESS_LOG]


async def _sample(load_clients: Clients, server: Server, idle: Mapping[str, float], seconds: float) -> Sample:
    target = Target(GRPC, server.address, _MODEL)
    load, used = await load_clients.measure_with_usage(target, _CASE, server.roots, seconds)
    if load.failures or not load.took_s:
        raise RuntimeError(f"{len(load.took_s)} calls answered; failures: {load.failures}")
    answers = len(load.took_s)
    for_calls = {role: max(0.0, spent - idle.get(role, 0.0) * seconds) for role, spent in used.items()}
    return Sample(answers / seconds, {role: 1e6 * spent / answers for role, spent in for_calls.items()})


def _report(samples: Samples) -> dict[str, Any]:
    report: dict[str, Any] = {}
    before: list[Sample] = []
    for name in (*_STEPS, _FLOOR):
        measured = samples[name]
        every_role = sorted({role.partition("-")[0] for sample in measured for role in sample.cpu_us})
        report[name] = {
            "per_s": round(median(sample.per_s for sample in measured), 1),
            "us_a_call": round(median(sample.total for sample in measured), 1),
            "us_by_process": {role: round(median(_of(sample, role) for sample in measured), 1) for role in every_role},
            "us_each_round": [round(sample.total, 1) for sample in measured],
        }
        if before:
            saved = [old.total - new.total for old, new in zip(before, measured, strict=True)]
            report[name]["saves_us"] = {key: round(value, 1) for key, value in asdict(estimate(saved)).items()}
        before = measured
    return report


def _of(sample: Sample, role: str) -> float:
    return sum(spent for name, spent in sample.cpu_us.items() if name.partition("-")[0] == role)


def _table(report: Mapping[str, Any]) -> str:
    processes = ("envoy", "transformer", "predictor", "logger")
    lines = [
        f"{'without':<16}{'calls/s':>9}{'µs a call':>11}" + "".join(f"{name:>13}" for name in processes) + "   saves"
    ]
    for name, row in report["without"].items():
        by_process = "".join(f"{row['us_by_process'].get(process, 0):>13.0f}" for process in processes)
        saved = row.get("saves_us")
        text = f"   {saved['median']:.0f} ({saved['low']:.0f} to {saved['high']:.0f})" if saved else ""
        lines.append(f"{name:<16}{row['per_s']:>9.0f}{row['us_a_call']:>11.0f}{by_process}{text}")
    lines += ["", "parts of a service, µs alone in one thread"]
    lines += [f"  {name:<44}{spent:>8.1f}" for name, spent in report["parts_us"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
