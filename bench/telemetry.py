"""The cost of telemetry on the serving path: tracing everything, compared with tracing nothing, in one run.

Three whole stacks, running at the same time. `traced`: each request is traced through every hop, spans are exported to
a collector in another process, metrics are scraped every five seconds. `untraced`: only the metrics. `off`:
OpenTelemetry's SDK is disabled, and Envoy traces nothing. They alternate in random order, block by block, so other load
on the machine affects all of them. The model computes nothing (instant_predictor.py): the figures are those of the
serving path, on cores shared with the callers.

`streamed`: messages a second of 32 `Generate` streams of 128 tokens; a stream that is read slower than its tokens are
generated gets more tokens in each message. `unary`: answers a second of 16 callers of `ModelInfer`, a tensor of 64
numbers to the model `identity` and back, through the transformer. The aims are ratios of `traced` to `untraced`, the
median over the blocks of consecutive measurements: at least 0.95 streamed, 0.90 unary; with the 95 % interval. Also
reported: the ratio to `off`, and the processor time of each process for a message or an answer.

`python -m bench.telemetry` writes bench/results/telemetry.json; 11 minutes.
"""

import asyncio
import random
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from statistics import median
from typing import Any, NamedTuple

import grpc
import numpy as np

from bench.otlp_receiver import ReceiverProcess, receiver_process
from bench.runs import PROMPT, cpu_seconds, machine, parser, running_stack, write
from bench.statistics import estimate, paired_ratios
from headrace.oip.tensors import Tensor, add_input
from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from tests.support.runner_stack import Stack

_TEXT_MODEL, _TENSOR_MODEL = "storyteller", "identity"
_MODES = ("traced", "untraced", "off")
_RATIOS = (("traced", "untraced"), ("untraced", "off"), ("traced", "off"))
_AIM = "traced / untraced"
_AIMS = {"streamed": 0.95, "unary": 0.90}
_PACE_MS = 4
_TOKENS = 128
_CONNECTIONS = 4
_SCRAPE_S = 5.0
_UNCOUNTED = 0.25  # The share of a block, at its start.
_CALL_TIMEOUT_S = 30.0

# Makes one request, and calls its argument for each message or answer.
Ask = Callable[[Callable[[], None]], Awaitable[None]]


class Case(NamedTuple):
    """`callers`, each with one request at a time."""

    callers: int
    ask: "Callable[[Mode], Ask]"


class Block(NamedTuple):
    """One mode in one block: messages or answers a second, and the processor time of each process for one of them."""

    per_s: float
    cpu_ms: dict[str, float]


class Mode(NamedTuple):
    """A running stack and its channels."""

    stack: Stack
    channels: tuple[grpc.aio.Channel, ...]


def main() -> None:
    options = parser(__doc__, "telemetry")
    options.add_argument("--blocks", type=int, default=40, help="of each case and mode")
    options.add_argument(
        "--seconds", type=float, default=2.0, help="of a block, the first quarter of which is not counted"
    )
    arguments = options.parse_args()
    report = asyncio.run(_measure(arguments.blocks, arguments.seconds))
    write(arguments.out, report)
    print(_table(report))
    if missed := [name for name, case in report["cases"].items() if not case["reached"]]:
        raise SystemExit(f"not reached: {', '.join(missed)}")


async def _measure(blocks: int, seconds: float) -> dict[str, Any]:
    async with AsyncExitStack() as opened:
        collector = opened.enter_context(receiver_process())
        modes = {name: await _start(opened, name, collector) for name in _MODES}
        scraper = asyncio.create_task(_scrape([modes["traced"].stack, modes["untraced"].stack]))
        opened.push_async_callback(_end, scraper)
        cases = {name: await _measure_case(name, modes, blocks, seconds) for name in _CASES}
        await asyncio.sleep(_SCRAPE_S)  # Time for spans to reach the collector.
        spans_exported = collector.span_count()
    return {
        "machine": machine(),
        "tokens_a_stream": _TOKENS,
        "pace_ms": _PACE_MS,
        "seconds_a_block": seconds,
        "spans_exported": spans_exported,
        "cases": cases,
    }


async def _start(opened: AsyncExitStack, name: str, collector: ReceiverProcess) -> Mode:
    # Empty means unset: nothing of this process's environment is passed on.
    endpoint = collector.endpoint if name == "traced" else ""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}
    if name != "traced":
        variables["OTEL_TRACES_SAMPLER"] = "always_off"
    if name == "off":
        variables["OTEL_SDK_DISABLED"] = "true"
    stack = await opened.enter_async_context(
        running_stack(
            *(_TEXT_MODEL, _TENSOR_MODEL),
            predictor="instant_predictor",
            environment={
                "transformer": variables,
                "logger": variables,
                "predictor": variables | {"PACE_MS": str(_PACE_MS), "PREDICTOR_MAX_RUNNING": "64"},
            },
            gateway_trace_percent=100 if name == "traced" else 0,
            otel_exporter_otlp_endpoint=collector.endpoint,
        )
    )
    channels = []
    for number in range(_CONNECTIONS):  # A distinct option: otherwise they would share one connection.
        channel = grpc.aio.insecure_channel(stack.gateway, options=[("headrace.number", number)])
        channels.append(await opened.enter_async_context(channel))
    return Mode(stack, tuple(channels))


async def _scrape(stacks: list[Stack]) -> None:
    """Reads every page as Prometheus would."""
    pages = [page for stack in stacks for pages in stack.metrics_pages.values() for page in pages]
    while True:
        for host, port, path in pages:
            await asyncio.to_thread(_get, f"http://{host}:{port}{path}")
        await asyncio.sleep(_SCRAPE_S)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_CALL_TIMEOUT_S) as page:  # noqa: S310  # Our own pages.
        return bytes(page.read())


async def _end(task: asyncio.Task[None]) -> None:
    """Raises the task's exception."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _measure_case(name: str, modes: Mapping[str, Mode], blocks: int, seconds: float) -> dict[str, Any]:
    for mode in modes.values():
        await _block(mode, _CASES[name], seconds)  # Not counted: it warms up.
    measured: dict[str, list[Block]] = defaultdict(list)
    for _ in range(blocks):
        for mode_name in random.sample(_MODES, len(_MODES)):
            measured[mode_name].append(await _block(modes[mode_name], _CASES[name], seconds))
    return _report(name, measured)


async def _block(mode: Mode, case: Case, seconds: float) -> Block:
    ask = case.ask(mode)
    counted = 0
    begin = time.monotonic() + _UNCOUNTED * seconds
    end = begin + (1 - _UNCOUNTED) * seconds

    def count() -> None:
        nonlocal counted
        counted += begin <= time.monotonic() < end

    async def call_again_and_again() -> None:
        while time.monotonic() < end:
            await ask(count)

    async def processor_time() -> dict[str, float]:
        await asyncio.sleep(begin - time.monotonic())
        before = cpu_seconds(mode.stack)
        await asyncio.sleep(end - time.monotonic())
        return {process: spent - before[process] for process, spent in cpu_seconds(mode.stack).items()}

    async with asyncio.TaskGroup() as group:
        spent = group.create_task(processor_time())
        for _ in range(case.callers):
            group.create_task(call_again_and_again())
    if not counted:
        raise RuntimeError("nothing came within a block: make it longer")
    return Block(counted / (end - begin), {name: 1000 * seconds / counted for name, seconds in spent.result().items()})


def _streamed(mode: Mode) -> Ask:
    # As bytes, because the callers' decoding is not measured.
    request = headrace_pb2.GenerateRequest(
        model=_TEXT_MODEL, prompt=PROMPT, max_tokens=_TOKENS, ignore_eos=True, temperature=0
    ).SerializeToString()
    calls: list[Any] = [channel.unary_stream("/headrace.v1.TextGeneration/Generate") for channel in mode.channels]

    async def ask(count: Callable[[], None]) -> None:
        async for _ in random.choice(calls)(request, timeout=_CALL_TIMEOUT_S):  # noqa: S311
            count()

    return ask


def _unary(mode: Mode) -> Ask:
    message = pb.ModelInferRequest(model_name=_TENSOR_MODEL)
    add_input(message, Tensor("x", "FP32", np.zeros((1, 64), np.float32)))
    request = message.SerializeToString()
    calls: list[Any] = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in mode.channels]

    async def ask(count: Callable[[], None]) -> None:
        await random.choice(calls)(request, timeout=_CALL_TIMEOUT_S)  # noqa: S311
        count()

    return ask


_CASES = {"streamed": Case(callers=32, ask=_streamed), "unary": Case(callers=16, ask=_unary)}


def _report(name: str, measured: Mapping[str, list[Block]]) -> dict[str, Any]:
    report: dict[str, Any] = {"aim": _AIMS[name], "modes": {}, "ratios": {}}
    for mode in _MODES:
        blocks = measured[mode]
        report["modes"][mode] = {
            "median_per_s": round(median(block.per_s for block in blocks), 1),
            "per_s": [round(block.per_s, 1) for block in blocks],
            "cpu_ms_each": {
                process: round(median(block.cpu_ms[process] for block in blocks), 4) for process in blocks[0].cpu_ms
            },
        }
    for one, other in _RATIOS:
        ratios = paired_ratios([block.per_s for block in measured[one]], [block.per_s for block in measured[other]])
        interval = estimate(ratios)
        report["ratios"][f"{one} / {other}"] = {
            "median": round(interval.median, 3),
            "low": round(interval.low, 3),
            "high": round(interval.high, 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    report["reached"] = report["ratios"][_AIM]["median"] >= _AIMS[name]
    return report


def _table(report: Mapping[str, Any]) -> str:
    lines = []
    for name, case in report["cases"].items():
        lines.append(f"\n{name:<10}{'a second':>10}  processor time each, ms")
        for mode, figures in case["modes"].items():
            spent = "  ".join(f"{process} {each:.3f}" for process, each in figures["cpu_ms_each"].items())
            lines.append(f"  {mode:<10}{figures['median_per_s']:>8.0f}  {spent}")
        for pair, ratio in case["ratios"].items():
            interval = f"{ratio['median']:.3f}  ({ratio['low']:.3f} to {ratio['high']:.3f})"
            aim = f"  aim >= {case['aim']}: {'reached' if case['reached'] else 'MISSED'}" if pair == _AIM else ""
            lines.append(f"  {pair:<20}{interval}{aim}")
    return "\n".join([*lines, f"\n{report['spans_exported']} spans exported"])


if __name__ == "__main__":
    main()
