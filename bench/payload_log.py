"""The cost of recording for a stream: recording everything, compared with recording nothing, in one run.

Two whole stacks with a paced model; one records everything (TRANSFORMER_PAYLOAD_LOG=all), the other nothing (off). They
alternate in random order, round by round: so other load on the machine affects both. Measured at 1 and at 32 streams,
at a gRPC client: the time to the first token of consecutive requests, and the gaps between the chunks of long answers,
at least 10,000 of each. The aims: the ratio of the medians at most 1.05, that of the p99 at most 1.15; each ratio has
its 95 % interval over the rounds. The pace of one stream is 10 ms a step; of 32 it is 30 ms, so that two cores are not
saturated.

In addition, without an aim, two loads that saturate the processor, where a time measures the work of all processes for
a request: 32 streams at 10 ms a step, and 32 callers that request one token after another without a pause.

`python -m bench.payload_log` writes bench/results/payload_log.json; 50 minutes.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import grpc

from bench.runs import PROMPT, parser, running_stack, write
from bench.statistics import estimate, quantile
from headrace_protos import headrace_pb2, headrace_pb2_grpc

_MODEL = "storyteller"
_MODES = ("all", "off")
_AIMS = {"median": 1.05, "p99": 1.15}
_SHARES = {"median": 0.5, "p99": 0.99}
_ROUND_TIMEOUT_S = 120.0

# mode → the samples of each round, milliseconds.
Rounds = dict[str, list[list[float]]]
Read = Callable[[float, Sequence[float]], list[float]]


class Case(NamedTuple):
    """One round: `streams` at once, each with `requests` in sequence, each of `tokens`.

    Lengths between two numbers are random, so that the streams do not all begin and end together.
    """

    streams: int
    requests: int
    tokens: tuple[int, int]
    read: Read
    pace_ms: int = 10
    has_aims: bool = True


def main() -> None:
    options = parser(__doc__, "payload_log")
    options.add_argument("--samples", type=int, default=10_000, help="of each mode and case, at least")
    options.add_argument("--rounds", type=int, default=11, help="of each case, at least")
    options.add_argument("--only", action="append", choices=_CASES, help="a case; the others stay as the file has them")
    arguments = options.parse_args()
    cases = asyncio.run(_measure(arguments.only or list(_CASES), arguments.samples, arguments.rounds))
    before = json.loads(arguments.out.read_text())["cases"] if arguments.only else {}
    cases = {name: (before | cases)[name] for name in _CASES if name in before | cases}
    write(arguments.out, {"aims": _AIMS, "cases": cases})
    for name, case in cases.items():
        for share, ratio in case["ratios"].items():
            print(f"{name:<36} {share:<7} {case['all'][share]:>8} / {case['off'][share]:>8} ms", *ratio.values())


async def _measure(names: Sequence[str], samples: int, rounds: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for pace_ms in sorted({_CASES[name].pace_ms for name in names}):
        async with AsyncExitStack() as stacks:
            stubs = {mode: await _stub(stacks, mode, pace_ms) for mode in _MODES}
            for name in names:
                if _CASES[name].pace_ms == pace_ms:
                    report[name] = await _measure_case(stubs, _CASES[name], samples, rounds)
    return report


async def _measure_case(stubs: Mapping[str, Any], case: Case, samples: int, rounds: int) -> dict[str, Any]:
    for stub in stubs.values():
        await _round(stub, case, 0)  # Not counted: it warms up.
    measured: Rounds = defaultdict(list)
    while (seed := len(measured["off"])) < rounds or sum(map(len, measured["off"])) < samples:
        for mode in random.sample(_MODES, len(_MODES)):
            measured[mode].append(await _round(stubs[mode], case, seed))
    return {"pace_ms": case.pace_ms, **_compared(measured, case.has_aims)}


async def _stub(stacks: AsyncExitStack, mode: str, pace_ms: int) -> Any:
    environment = {"predictor": {"PACE_MS": str(pace_ms)}, "transformer": {"TRANSFORMER_PAYLOAD_LOG": mode}}
    stack = await stacks.enter_async_context(
        running_stack(_MODEL, predictor="paced_predictor", environment=environment)
    )
    channel = await stacks.enter_async_context(grpc.aio.insecure_channel(stack.gateway))
    return headrace_pb2_grpc.TextGenerationStub(channel)


async def _round(stub: Any, case: Case, seed: int) -> list[float]:
    """The samples of one round; the same seed gives the same lengths, so that both modes do the same work."""
    dice = random.Random(seed)  # noqa: S311

    async def one_stream() -> list[float]:
        samples = []
        for _ in range(case.requests):
            tokens = dice.randint(*case.tokens)
            request = headrace_pb2.GenerateRequest(
                model=_MODEL, prompt=PROMPT, max_tokens=tokens, ignore_eos=True, temperature=0
            )
            started = time.monotonic()
            arrivals = [time.monotonic() async for _ in stub.Generate(request)]
            samples += case.read(started, arrivals)
        return samples

    async with asyncio.timeout(_ROUND_TIMEOUT_S):
        streams = await asyncio.gather(*(one_stream() for _ in range(case.streams)))
    return [sample for stream in streams for sample in stream]


def _first_ms(started: float, arrivals: Sequence[float]) -> list[float]:
    return [(arrivals[0] - started) * 1000]


def _gaps_ms(started: float, arrivals: Sequence[float]) -> list[float]:
    return [(after - before) * 1000 for before, after in pairwise(arrivals)]


_CASES = {
    "first token, 1 stream": Case(streams=1, requests=50, tokens=(1, 1), read=_first_ms),
    "gaps, 1 stream": Case(streams=1, requests=1, tokens=(200, 200), read=_gaps_ms),
    "first token, 32 streams": Case(streams=32, requests=4, tokens=(10, 50), read=_first_ms, pace_ms=30),
    "gaps, 32 streams": Case(streams=32, requests=1, tokens=(50, 50), read=_gaps_ms, pace_ms=30),
    "first token, 32 streams, processor full": Case(
        streams=32, requests=4, tokens=(10, 50), read=_first_ms, has_aims=False
    ),
    "first token, 32 callers of one token": Case(streams=32, requests=4, tokens=(1, 1), read=_first_ms, has_aims=False),
}


def _compared(measured: Mapping[str, Sequence[Sequence[float]]], has_aims: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        mode: {
            "samples": sum(map(len, rounds)),
            **{
                name: round(quantile([sample for each in rounds for sample in each], share), 3)
                for name, share in _SHARES.items()
            },
        }
        for mode, rounds in measured.items()
    }
    report["ratios"] = {}
    for name, share in _SHARES.items():
        ratios = [
            quantile(on, share) / quantile(off, share) for on, off in zip(measured["all"], measured["off"], strict=True)
        ]
        interval = estimate(ratios)
        report["ratios"][name] = {
            "of_all": round(report["all"][name] / report["off"][name], 3),
            "median_of_rounds": round(interval.median, 3),
            "low": round(interval.low, 3),
            "high": round(interval.high, 3),
        }
        if has_aims:
            report["ratios"][name]["reached"] = report["all"][name] / report["off"][name] <= _AIMS[name]
    return report


if __name__ == "__main__":
    main()
