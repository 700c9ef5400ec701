"""Goodput under overload: what a stack still gets done when four times as much is asked of it as it can do.

A real stack, the model paced at 25 ms a step so that the machine's other work does not decide. Requests of 16 to 64
tokens, each with a deadline of 5 s. Goodput is the tokens a second of the requests that ended OK within their deadline.
Its peak is the best of a sweep: so many callers, each of which asks again when it has its answer. Then requests come
at random at four times the rate of the peak, whatever becomes of them, for a minute. The aim is at least 90 % of
the peak: what cannot be done in time has to be refused at once, for a request that misses its deadline has used up a
place for nothing.

`python -m bench.overload` writes bench/results/overload.json; 4 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.statistics import quantile
from bench.streams import PROMPT
from millrace.protos import millrace_pb2, millrace_pb2_grpc
from runner.free_ports import start_stack

_RESULTS = Path(__file__).resolve().parent / "results" / "overload.json"
_MODEL = "storyteller"
_PACE_MS = 25
_RUNNING = 16
_TOKENS = (16, 32, 64)
_DEADLINE_S = 5.0
_CALLERS = (8, 16, 24, 32, 48)
_OVERLOAD = 4
_AIM = 0.9
_WARM_UP_S = 5.0  # At the beginning of each measurement, not counted: the queue fills.


class Outcome(NamedTuple):
    """One request: when it ended (monotonic), what became of it, its tokens and how long it took."""

    ended: float
    status: str
    tokens: int
    took_s: float

    @property
    def good_tokens(self) -> int:
        return self.tokens if self.status == "OK" and self.took_s <= _DEADLINE_S else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep-seconds", type=float, default=25.0, help="of each number of callers")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    told = asyncio.run(_measure(arguments.sweep_seconds, arguments.overload_seconds))
    arguments.out.write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps({name: told[name] for name in ("peak", "overload", "ratio", "aim", "reached")}, indent=2))


async def _measure(sweep_s: float, overload_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stack = await start_stack(
            Path(folder),
            {"models": f"{_MODEL}=models/{_MODEL}"},
            commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
            environment={
                "predictor": {"PACE_MS": str(_PACE_MS), "PACE_SEED": "1", "PREDICTOR_MAX_RUNNING": str(_RUNNING)}
            },
            say=lambda line: None,
        )
        try:
            async with grpc.aio.insecure_channel(stack.gateway) as channel:
                stub = millrace_pb2_grpc.TextGenerationStub(channel)
                sweep = {callers: await _closed_loop(stub, callers, sweep_s) for callers in _CALLERS}
                callers, peak = max(sweep.items(), key=lambda item: float(item[1]["goodput"]))
                rate = _OVERLOAD * peak["ended_ok_per_s"]
                overload = await _open_loop(stub, rate, overload_s)
        finally:
            await stack.stop()
    ratio = overload["goodput"] / peak["goodput"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "pace_ms": _PACE_MS,
        "max_running": _RUNNING,
        "tokens": _TOKENS,
        "deadline_s": _DEADLINE_S,
        "sweep": sweep,
        "peak": {"callers": callers, **peak},
        "overload": {"times": _OVERLOAD, "requests_per_s": round(rate, 1), **overload},
        "ratio": round(ratio, 3),
        "aim": _AIM,
        "reached": ratio >= _AIM,
    }


async def _closed_loop(stub: Any, callers: int, seconds: float) -> dict[str, Any]:
    """So many callers, each of which has one request at a time."""
    outcomes: list[Outcome] = []
    draw = random.Random(callers)  # noqa: S311  # Lengths, no secrets.
    begun = time.monotonic()
    end = begun + _WARM_UP_S + seconds

    async def call_again_and_again() -> None:
        while time.monotonic() < end:
            outcomes.append(await _ask(stub, draw.choice(_TOKENS)))

    await asyncio.gather(*(call_again_and_again() for _ in range(callers)))
    return _told(outcomes, begun + _WARM_UP_S, end)


async def _open_loop(stub: Any, rate: float, seconds: float) -> dict[str, Any]:
    """Requests that come at random, `rate` a second, and wait for nobody."""
    outcomes: list[Outcome] = []
    draw = random.Random(_OVERLOAD)  # noqa: S311
    begun = time.monotonic()
    end = begun + _WARM_UP_S + seconds

    async def ask(tokens: int) -> None:
        outcomes.append(await _ask(stub, tokens))

    async with asyncio.TaskGroup() as group:
        due = begun
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(ask(draw.choice(_TOKENS)))
            due += draw.expovariate(rate)
    return _told(outcomes, begun + _WARM_UP_S, end)


async def _ask(stub: Any, tokens: int) -> Outcome:
    request = millrace_pb2.GenerateRequest(model=_MODEL, prompt=PROMPT, max_tokens=tokens, ignore_eos=True)
    begun = time.monotonic()
    made, status = 0, "OK"
    try:
        async for response in stub.Generate(request, timeout=_DEADLINE_S):
            made += len(response.token_ids)
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    now = time.monotonic()
    return Outcome(now, status, made, now - begun)


def _told(outcomes: Sequence[Outcome], begin: float, end: float) -> dict[str, Any]:
    """The figures of what ended between two moments."""
    counted = [outcome for outcome in outcomes if begin <= outcome.ended < end]
    seconds = end - begin
    good = [outcome for outcome in counted if outcome.good_tokens]
    refused = [outcome.took_s * 1000 for outcome in counted if outcome.status == "RESOURCE_EXHAUSTED"]
    return {
        "goodput": round(sum(outcome.good_tokens for outcome in good) / seconds, 1),
        "tokens_per_s": round(sum(outcome.tokens for outcome in counted) / seconds, 1),
        "ended_ok_per_s": round(len(good) / seconds, 2),
        "p50_s": round(quantile([outcome.took_s for outcome in good], 0.5), 3) if good else None,
        "p99_s": round(quantile([outcome.took_s for outcome in good], 0.99), 3) if good else None,
        "refused_p99_ms": round(quantile(refused, 0.99), 1) if refused else None,
        "statuses": dict(Counter(outcome.status for outcome in counted)),
    }


if __name__ == "__main__":
    main()
