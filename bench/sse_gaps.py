"""Gaps between the pieces of a stream: at the client, beside those between the tokens at the engine.

A model that is paced (paced_predictor.py) makes a token every 5 to 60 ms. On each streaming way in, the
whole stack between, with logging on, each gap at the client is held against the gap between the same two
tokens where they were made. What buffers, coalesces or delays shows as their difference; the median of
its size is to stay below 5 ms. `python -m bench.sse_gaps` writes bench/results/sse_gaps.json.

A stream of which the client got another number of pieces than the engine made tokens, because a reader
lagged or a character spans tokens, cannot be compared token by token; it is counted and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.statistics import quantile
from bench.streams import WAYS_IN, WayIn
from runner.free_ports import start_stack

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "bench" / "results" / "sse_gaps.json"
_MODEL = "storyteller"
_AIM_MS = 5.0
_STREAM_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="streams of each way in, one after another")
    parser.add_argument("--tokens", type=int, default=40, help="tokens a stream")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    results = asyncio.run(_measure(arguments.streams, arguments.tokens))
    told = {"model": _MODEL, "tokens": arguments.tokens, "aim_median_difference_ms": _AIM_MS, "ways_in": results}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(told, indent=2) + "\n")
    for name, figures in results.items():
        print(f"{name:<18}", *(f"{key}={value}" for key, value in figures.items()))
    if missed := [name for name, figures in results.items() if not figures["reached"]]:
        raise SystemExit(f"not reached: {', '.join(missed)}")


async def _measure(streams: int, tokens: int) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "made"
        stack = await start_stack(
            Path(folder),
            {"models": f"{_MODEL}=models/{_MODEL}"},
            commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
            environment={"predictor": {"PACE_LOG": str(log), "PACE_SEED": "1"}},
            say=lambda line: None,
        )
        try:
            arrived: dict[str, dict[str, list[float]]] = defaultdict(dict)
            for stream in range(streams):  # Taken in turns: what else the machine does meets all of them.
                for name, way_in in WAYS_IN.items():
                    request_id = f"{name}-{stream}".replace(" ", "-")
                    arrived[name][request_id] = await _arrivals(way_in, stack.gateway, tokens, request_id)
        finally:
            await stack.stop()
        made = _made(log)
    return {name: _compared(of, made) for name, of in arrived.items()}


async def _arrivals(way_in: WayIn, gateway: str, tokens: int, request_id: str) -> list[float]:
    times = []
    async with asyncio.timeout(_STREAM_TIMEOUT_S), aclosing(way_in(gateway, _MODEL, tokens, request_id)) as pieces:
        async for _ in pieces:
            times.append(time.monotonic())
    return times


def _made(log: Path) -> dict[str, list[float]]:
    """When each token of each request was made."""
    made: dict[str, list[float]] = defaultdict(list)
    for line in log.read_text().splitlines():
        request_id, _, at = line.partition("\t")
        made[request_id].append(float(at))
    return made


def _compared(arrived: dict[str, list[float]], made: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of one way in; milliseconds."""
    engine, client = [], []
    compared = 0
    for request_id, times in arrived.items():
        if len(times) == len(made[request_id]):
            compared += 1
            engine += _gaps_ms(made[request_id])
            client += _gaps_ms(times)
    differences = [abs(theirs - ours) for theirs, ours in zip(client, engine, strict=True)]
    if not differences:
        return {"streams": len(arrived), "compared": 0, "reached": False}
    middle = quantile(differences, 0.5)
    return {
        "streams": len(arrived),
        "compared": compared,
        "gaps": len(differences),
        "median_gap_engine_ms": round(quantile(engine, 0.5), 2),
        "median_gap_client_ms": round(quantile(client, 0.5), 2),
        "median_difference_ms": round(middle, 3),
        "p99_difference_ms": round(quantile(differences, 0.99), 2),
        "reached": middle < _AIM_MS,
    }


def _gaps_ms(times: Sequence[float]) -> list[float]:
    return [(after - before) * 1000 for before, after in pairwise(times)]


if __name__ == "__main__":
    main()
