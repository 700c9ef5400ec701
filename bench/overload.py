"""Goodput under overload: the useful output of a stack whose load exceeds its capacity many times.

A closed loop of clients: each caller sends a request as soon as its previous answer is complete, 16 to 64 tokens, a
deadline of 5 s, three predictors, the client on the same cores. Goodput is the tokens a second of answers that were
complete within their deadline. The peak is the best of a sweep over few callers; each overload is measured between two
arms at that peak (A-B-A), and its ratio is that to their mean.

A refused caller retries at once, which is the worst case (refusals compete with answers for the same cores), or after
`retry-after`. Every other outcome is counted separately: `good`, `late` (the deadline passed, or the answer arrived
after it), `refused`, `unsigned` (refused without x-failed-hop or retry-after-ms) and `failed`.

`python -m bench.overload` writes bench/results/overload.json; less than 8 minutes. `--paced MS` removes the model's
computation: each step sleeps for that time instead of competing for the cores. `--taken S`: a process of the highest
priority takes one core away for S seconds in the middle of each arm, those at the peak included.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc

from bench.runs import PROMPT, cpu_seconds, parser, running_stack, write
from bench.statistics import quantile
from headrace.errors import FAILED_HOP, RETRY_AFTER_MS
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.runner_stack import Stack

_MODEL = "storyteller"
_PREDICTORS = 3
_TOKENS = (16, 64)
_DEADLINE_S = 5.0
_SWEEP = (16, 32, 64, 128)
_OVERLOADS = (96, 384, 1500)
_AIM = 0.9
_WARM_UP_S = 5.0  # At the start of each arm, not counted: the queue fills, or empties.
_CONNECTIONS = 4


class Outcome(NamedTuple):
    """One request: the time of its end (monotonic), its tokens, its duration, and when its caller may retry."""

    ended: float
    kind: str
    status: str
    tokens: int
    took_s: float
    retry_after_s: float = 0.0


Ask: TypeAlias = Callable[[int], Awaitable[Outcome]]


def main() -> None:
    options = parser(__doc__, "overload")
    options.add_argument("--seconds", type=float, default=15.0, help="of each arm, beside its warm-up")
    options.add_argument("--sweep", type=int, nargs="+", default=_SWEEP, help="numbers of callers that may be the peak")
    options.add_argument(
        "--callers", type=int, nargs="+", default=_OVERLOADS, help="numbers of callers that are too many"
    )
    options.add_argument("--paced", type=float, metavar="MS", help="a model that sleeps instead of computing")
    options.add_argument("--taken", type=float, default=0.0, metavar="S", help="seconds that each arm lacks a core")
    options.add_argument("--no-variations", action="store_true", help="gRPC callers that come back at once alone")
    arguments = options.parse_args()
    report = asyncio.run(_measure(arguments))
    write(arguments.out, report)
    print(json.dumps({name: report[name] for name in ("peak", "ratios", "aim", "reached")}, indent=2))


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    paced: dict[str, Any] = {}
    if arguments.paced is not None:
        environment = {"predictor": {"PACE_MS": str(arguments.paced)}}
        paced = {"predictor": "paced_predictor", "environment": environment}
    arm = functools.partial(_arm, taken_s=arguments.taken)
    async with (
        running_stack(_MODEL, predictors=_PREDICTORS, **paced) as stack,
        _grpc_callers(stack) as grpc_ask,
    ):
        await _arm(stack, "warm-up", grpc_ask, max(arguments.sweep), 2.0)
        sweep = [await arm(stack, "sweep", grpc_ask, n, arguments.seconds / 2) for n in arguments.sweep]
        peak = max(sweep, key=lambda arm: float(arm["goodput"]))["callers"]
        plans = [("gRPC, back at once", grpc_ask, callers, False) for callers in arguments.callers]
        if not arguments.no_variations:
            openai = _openai_callers(stack)
            plans += [
                ("gRPC, back after retry-after", grpc_ask, 384, True),
                ("SSE, back at once", openai, 384, False),
            ]
        arms: list[dict[str, Any]] = []
        for name, ask, callers, patient in plans:
            if not arms or arms[-1]["ask"] != name.partition(",")[0]:
                arms.append(await arm(stack, name, ask, peak, arguments.seconds, patient))
            arms.append(await arm(stack, name, ask, callers, arguments.seconds, patient))
            arms.append(await arm(stack, name, ask, peak, arguments.seconds, patient))
    ratios = _ratios(arms, peak)
    return {
        "cores": os.cpu_count(),
        "predictors": _PREDICTORS,
        "model": _MODEL if arguments.paced is None else f"{_MODEL}, each step {arguments.paced:g} ms longer",
        "tokens": _TOKENS,
        "deadline_s": _DEADLINE_S,
        "peak": {"callers": peak},
        "sweep": sweep,
        "arms": arms,
        "ratios": ratios,
        "aim": _AIM,
        "reached": all(ratio["ratio"] >= _AIM for ratio in ratios),
    }


async def _arm(
    stack: Stack, name: str, ask: Ask, callers: int, seconds: float, patient: bool = False, taken_s: float = 0.0
) -> dict[str, Any]:
    """Runs a number of callers for a time; each has one request at a time."""
    outcomes: list[Outcome] = []
    draw = random.Random(callers)  # noqa: S311  # Lengths, no secrets.
    started = time.monotonic()
    end = started + _WARM_UP_S + seconds

    async def call_again_and_again() -> None:
        while time.monotonic() < end:
            outcome = await ask(draw.randint(*_TOKENS))
            outcomes.append(outcome)
            if patient and outcome.kind == "refused":
                await asyncio.sleep(min(outcome.retry_after_s, end - outcome.ended))

    calls = asyncio.gather(*(call_again_and_again() for _ in range(callers)))
    await asyncio.sleep(_WARM_UP_S)
    before = cpu_seconds(stack)
    async with _core_taken(max(0.0, (seconds - taken_s) / 2), min(taken_s, seconds)):
        await asyncio.sleep(seconds)
    cpu = {process: round((after - before[process]) / seconds, 2) for process, after in cpu_seconds(stack).items()}
    await calls
    arm = {"ask": name.partition(",")[0], "name": name, "callers": callers, "seconds": seconds}
    arm |= _figures(outcomes, started + _WARM_UP_S, end) | {"cores_used": cpu}
    print(json.dumps(arm), file=sys.stderr, flush=True)
    return arm


@contextlib.asynccontextmanager
async def _core_taken(after_s: float, seconds: float) -> AsyncIterator[None]:
    """Takes core 0 away for `seconds`, from `after_s` on; the priority needs root."""
    if not seconds:
        yield
        return
    code = (
        "import contextlib, os, time\nos.sched_setaffinity(0, {0})\n"
        "with contextlib.suppress(OSError): os.nice(-20)\n"
        f"time.sleep({after_s})\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _grpc_callers(stack: Stack) -> AsyncIterator[Ask]:
    async with contextlib.AsyncExitStack() as opened:
        channels = [
            await opened.enter_async_context(
                grpc.aio.insecure_channel(stack.gateway, options=(("grpc.use_local_subchannel_pool", 1),))
            )
            for _ in range(_CONNECTIONS)
        ]
        stubs = [headrace_pb2_grpc.TextGenerationStub(channel) for channel in channels]
        turn = iter(range(sys.maxsize))

        async def ask(tokens: int) -> Outcome:
            request = headrace_pb2.GenerateRequest(model=_MODEL, prompt=PROMPT, max_tokens=tokens, ignore_eos=True)
            stub = stubs[next(turn) % _CONNECTIONS]
            started = time.monotonic()
            received, status, metadata = 0, "OK", {}
            try:
                async for response in stub.Generate(request, timeout=_DEADLINE_S):
                    received += len(response.token_ids)
            except grpc.aio.AioRpcError as error:
                status = error.code().name
                metadata = dict(error.trailing_metadata() or ()) | dict(error.initial_metadata() or ())
            return _outcome(
                started, status, received == tokens, received, metadata.get(FAILED_HOP), metadata.get(RETRY_AFTER_MS)
            )

        yield ask


def _openai_callers(stack: Stack) -> Ask:
    """OpenAI's completions as server-sent events, with a new connection for each call, like curl."""
    host, _, port = stack.gateway.rpartition(":")

    async def ask(tokens: int) -> Outcome:
        body = {"model": _MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {stack.gateway}\r\ncontent-type: application/json\r\n"
            f"x-timeout-ms: {1000 * _DEADLINE_S:.0f}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        started = time.monotonic()
        answer = b""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(head.encode() + data)
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except TimeoutError:
            return Outcome(time.monotonic(), "late", "timeout", 0, time.monotonic() - started)
        except OSError as error:
            return Outcome(time.monotonic(), "failed", type(error).__name__, 0, time.monotonic() - started)
        headers = answer.partition(b"\r\n\r\n")[0].decode().lower()
        fields = dict(line.split(": ", 1) for line in headers.split("\r\n")[1:] if ": " in line)
        http_status = headers.split(" ", 2)[1] if headers else "none"
        status = {"200": "OK", "429": "RESOURCE_EXHAUSTED", "504": "DEADLINE_EXCEEDED"}.get(http_status, http_status)
        whole = b"data: [DONE]" in answer and b'"error"' not in answer
        retry_after = fields.get("retry-after")
        retry_after_ms = None if retry_after is None else str(1000 * int(retry_after))
        return _outcome(started, status, whole, tokens if whole else 0, fields.get(FAILED_HOP), retry_after_ms)

    return ask


def _outcome(
    started: float, status: str, whole: bool, tokens: int, failed_hop: object, retry_after_ms: object
) -> Outcome:
    now = time.monotonic()
    took_s = now - started
    if status == "DEADLINE_EXCEEDED" or (status == "OK" and took_s > _DEADLINE_S):
        kind = "late"
    elif status == "RESOURCE_EXHAUSTED":
        kind = "refused" if failed_hop and retry_after_ms else "unsigned"
    else:
        kind = "good" if status == "OK" and whole else "failed"
    return Outcome(now, kind, status, tokens, took_s, int(str(retry_after_ms or 0)) / 1000)


def _figures(outcomes: Sequence[Outcome], begin: float, end: float) -> dict[str, Any]:
    """The figures of the requests that ended between two times."""
    counted = [outcome for outcome in outcomes if begin <= outcome.ended < end]
    seconds = end - begin
    good = [outcome for outcome in counted if outcome.kind == "good"]
    refused_ms = [1000 * outcome.took_s for outcome in counted if outcome.kind == "refused"]
    took_s = [outcome.took_s for outcome in good]
    return {
        "goodput": round(sum(outcome.tokens for outcome in good) / seconds, 1),
        "tokens_per_s": round(sum(outcome.tokens for outcome in counted) / seconds, 1),
        "outcomes": dict(Counter(outcome.kind for outcome in counted)),
        "good_per_s": round(len(good) / seconds, 2),
        "refused_per_s": round(len(refused_ms) / seconds, 2),
        "good_p50_s": round(quantile(took_s, 0.5), 3) if good else None,
        "good_p99_s": round(quantile(took_s, 0.99), 3) if good else None,
        "refused_p50_ms": round(quantile(refused_ms, 0.5), 1) if refused_ms else None,
        "refused_p99_ms": round(quantile(refused_ms, 0.99), 1) if refused_ms else None,
        "statuses": dict(Counter(outcome.status for outcome in counted)),
        "longest_s": round(max((outcome.took_s for outcome in outcomes), default=0.0), 2),
    }


def _ratios(arms: Sequence[dict[str, Any]], peak: int) -> list[dict[str, Any]]:
    """Each overload's goodput relative to the mean of the two arms at the peak load around it."""
    ratios = []
    for before, arm, after in zip(arms, arms[1:], arms[2:], strict=False):
        if before["callers"] == after["callers"] == peak != arm["callers"]:
            ratio = arm["goodput"] / ((before["goodput"] + after["goodput"]) / 2)
            times = round(arm["callers"] / peak, 1)
            ratios.append({"name": arm["name"], "callers": arm["callers"], "times": times, "ratio": round(ratio, 3)})
    return ratios


if __name__ == "__main__":
    main()
