"""The cost of keys, TLS and limits for a call, and the effect of a client with many streams or calls on one
with few; through the gateway.

`calls`: `ModelInfer` of 64 bytes by 16 callers, calls a second at a stack as `make up` starts it (`off`) and at one
with TLS and a key with limits that it does not reach (`on`), both running, in turns. `first_token`: milliseconds to the
first message of a `Generate` of the bundled model, one after another with its own key, alone (`quiet`) and
`beside` 200 streams of another client of the same weight, which a separate process keeps running. `flood`:
milliseconds of `ModelInfer` of 64 bytes, one after another, `quiet` and `beside` 1,000 calls a second of a client whose
key allows 100, which ignores the answers; its process has a low priority, since it represents another machine.

`python -m bench.keys` writes bench/results/keys.json; four minutes.
"""

import argparse
import asyncio
import os
import random
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import yaml

from bench.runs import machine, parser, running_stack, write
from bench.statistics import paired_ratios, quantile
from bench.tensor_cases import CASES, INFER
from headrace_protos.headrace_pb2 import GenerateRequest
from headrace_protos.headrace_pb2_grpc import TextGenerationStub
from headrace_runner.command.access import make_certificates

_CASE = "tiny"
_CLIENTS = ("light", "heavy", "flooding")
_STREAMS = 200
_SETTLE_S, _PAUSE_S = 3.0, 0.05
_FLOODS, _FLOOD_PAUSE_S, _FLOOD_ALLOWED = 20, 0.02, 100  # Callers, their pauses, and calls a second that are allowed.
_FLOODED_CALLS, _FLOODED_PAUSE_S = 500, 0.01
_NICENESS = 10
_HIGH = 100_000_000  # A limit out of reach.

Metadata = tuple[tuple[str, str], ...]


def main() -> None:
    options = parser(__doc__, "keys")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=3.0, help="of a measurement of calls")
    options.add_argument("--requests", type=int, default=20, help="of the light client in each round of first tokens")
    for name in _OTHERS:
        options.add_argument(f"--{name}", nargs=2, metavar=("ADDRESS", "KEY"), help=argparse.SUPPRESS)
    given = options.parse_args()
    for name, other in _OTHERS.items():
        if (where := getattr(given, name)) is not None:
            asyncio.run(other(*where))
            return
    report = asyncio.run(_measure(given))
    write(given.out, {"machine": machine(), **report})
    print(yaml.safe_dump(report, sort_keys=False))


async def _measure(given: argparse.Namespace) -> dict[str, Any]:
    keys = {name: "hr-" + secrets.token_urlsafe(32) for name in _CLIENTS}
    limits = {"requests_per_minute": _HIGH, "tokens_per_minute": _HIGH, "streams": 10_000}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries: list[dict[str, Any]] = [{"name": n, "key": k, **limits} for n, k in keys.items()]
        entries[_CLIENTS.index("flooding")]["requests_per_second"] = _FLOOD_ALLOWED
        (folder / "keys.yaml").write_text(yaml.safe_dump(entries))
        make_certificates(folder / "tls", ())
        models = "storyteller=models/storyteller,echo=models/identity"
        secured = {"gateway_keys": str(folder / "keys.yaml"), "gateway_tls": str(folder / "tls")}
        async with running_stack(models=models) as off, running_stack(models=models, **secured) as on:
            authority = grpc.ssl_channel_credentials((folder / "tls" / "authority.crt").read_bytes())
            own: Metadata = (("authorization", f"Bearer {keys['light']}"),)
            async with AsyncExitStack() as opened:
                ways = {
                    "off": (await opened.enter_async_context(grpc.aio.insecure_channel(off.gateway)), ()),
                    "on": (
                        await opened.enter_async_context(
                            grpc.aio.secure_channel(on.settings.gateway_with_tls, authority)
                        ),
                        own,
                    ),
                }
                calls = await _calls(given, ways)
                first_token = await _first_tokens(given, ways["on"], on.gateway, keys["heavy"])
                flood = await _flooded(ways["on"], on.gateway, keys["flooding"])
    return {"calls": calls, "first_token": first_token, "flood": flood}


async def _calls(given: argparse.Namespace, ways: dict[str, tuple[grpc.aio.Channel, Metadata]]) -> dict[str, Any]:
    per_s: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, given.rounds):
        for name in random.sample(tuple(ways), len(ways)):
            rate = await _rate(*ways[name], given.seconds)
            if number >= 0:  # The first round warms up.
                per_s[name].append(rate)
    rates = {name: round(median(values), 1) for name, values in per_s.items()}
    return {"per_s": rates, "on_to_off": round(median(paired_ratios(per_s["on"], per_s["off"])), 3)}


async def _rate(channel: grpc.aio.Channel, metadata: Metadata, seconds: float) -> float:
    call, request = channel.unary_unary(INFER), CASES[_CASE].request("echo")
    ends, answers = time.monotonic() + seconds, 0

    async def caller() -> None:
        nonlocal answers
        while time.monotonic() < ends:
            await call(request, metadata=metadata, timeout=30)
            answers += 1

    began = time.monotonic()
    await asyncio.gather(*(caller() for _ in range(CASES[_CASE].callers)))
    return answers / (time.monotonic() - began)


async def _first_tokens(
    given: argparse.Namespace, way: tuple[grpc.aio.Channel, Metadata], gateway: str, key: str
) -> dict[str, Any]:
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(2):
        times["quiet"] += await _first_token_ms(*way, given.requests)
        async with _running("heavy", gateway, key):
            times["beside"] += await _first_token_ms(*way, given.requests)
    cases = {
        case: {"p50_ms": round(median(ms), 1), "p95_ms": round(quantile(ms, 0.95), 1)} for case, ms in times.items()
    }
    return cases | {"beside_to_quiet": round(median(times["beside"]) / median(times["quiet"]), 2)}


async def _first_token_ms(channel: grpc.aio.Channel, metadata: Metadata, count: int) -> list[float]:
    stub, found = TextGenerationStub(channel), []
    for number in range(count):
        request = GenerateRequest(model="storyteller", prompt=f"Once upon a time {number}", max_tokens=8)
        began = time.monotonic()
        messages = aiter(stub.Generate(request, metadata=metadata, timeout=60))
        await anext(messages)
        found.append(1000 * (time.monotonic() - began))
        async for _ in messages:
            pass
        await asyncio.sleep(_PAUSE_S)
    return found


async def _flooded(way: tuple[grpc.aio.Channel, Metadata], gateway: str, key: str) -> dict[str, Any]:
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(2):
        times["quiet"] += await _calls_ms(*way)
        async with _running("flooding", gateway, key):
            times["beside"] += await _calls_ms(*way)
    cases = {case: {f"p{p}_ms": round(quantile(ms, p / 100), 1) for p in (50, 99)} for case, ms in times.items()}
    return cases | {"p99_beside_to_quiet": round(quantile(times["beside"], 0.99) / quantile(times["quiet"], 0.99), 2)}


async def _calls_ms(channel: grpc.aio.Channel, metadata: Metadata) -> list[float]:
    call, request, found = channel.unary_unary(INFER), CASES[_CASE].request("echo"), []
    for _ in range(_FLOODED_CALLS):
        began = time.monotonic()
        await call(request, metadata=metadata, timeout=30)
        found.append(1000 * (time.monotonic() - began))
        await asyncio.sleep(_FLOODED_PAUSE_S)
    return found


@asynccontextmanager
async def _running(name: str, gateway: str, key: str) -> AsyncIterator[None]:
    command = (sys.executable, "-m", "bench.keys", f"--{name}", gateway, key)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await asyncio.sleep(_SETTLE_S)
        yield
    finally:
        process.terminate()
        await process.wait()


async def _heavy(gateway: str, key: str) -> None:
    """Sends streams one after another, until the process ends."""
    async with grpc.aio.insecure_channel(gateway) as channel:
        stub, metadata = TextGenerationStub(channel), (("authorization", f"Bearer {key}"),)

        async def stream(number: int) -> None:
            while True:
                request = GenerateRequest(
                    model="storyteller", prompt=f"A fox {number}", max_tokens=64, ignore_eos=True, chunk_tokens=64
                )
                try:
                    async for _ in stub.Generate(request, metadata=metadata, timeout=60):
                        pass
                except grpc.aio.AioRpcError:  # Refused: the queue is full.
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(stream(number) for number in range(_STREAMS)))


async def _flooding(gateway: str, key: str) -> None:
    """Sends calls at a fixed pace, until the process ends."""
    os.nice(_NICENESS)
    async with grpc.aio.insecure_channel(gateway) as channel:
        call, request = channel.unary_unary(INFER), CASES[_CASE].request("echo")

        async def caller() -> None:
            while True:
                due = time.monotonic() + _FLOOD_PAUSE_S
                with suppress(grpc.aio.AioRpcError):
                    await call(request, metadata=(("authorization", f"Bearer {key}"),), timeout=30)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

        await asyncio.gather(*(caller() for _ in range(_FLOODS)))


_OTHERS = {"heavy": _heavy, "flooding": _flooding}


if __name__ == "__main__":
    main()
