"""The number of callers beyond which throughput stops growing: big tensors over gRPC and over V2 REST with JSON.

A real stack, a model that returns its input, tensors like a token model's: INT64 ids of 16 prompts of 2,048 tokens, 256
KiB in raw form. Each level is a number of callers, each with one request at a time; at each level the protocols are
measured one after the other. The knee is the level beyond which no other gives 10 % more answers. Every answer is
compared with its request.

`python -m bench.protocols` writes bench/results/protocols.json; 3 minutes.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc
import httpx2
import numpy as np
import orjson

from bench.runs import parser, running_stack, write
from bench.statistics import quantile
from headrace.oip.tensors import Tensor, add_input
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub

_MODEL = "identity"
_IDS = np.arange(16 * 2048, dtype=np.int64).reshape(16, 2048) % 50_000
_CALLERS = (1, 2, 4, 8, 16, 32, 64, 128)
_MORE = 1.1
_CONNECTIONS = 4
_TIMEOUT_S = 60.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_OK = "OK"

# Sends one request and returns its status; "wrong" if the answer differs from the request.
Ask = Callable[[], Awaitable[str]]


class Ended(NamedTuple):
    """One request: the time of its end (monotonic), its status, and its duration."""

    at: float
    status: str
    took_s: float


def main() -> None:
    options = parser(__doc__, "protocols")
    options.add_argument("--seconds", type=float, default=8.0, help="of each protocol at each level")
    arguments = options.parse_args()
    report = asyncio.run(_measure(arguments.seconds))
    write(arguments.out, report)
    print(json.dumps({"knees": report["knees"], "most_per_s": report["most_per_s"]}, indent=2))


async def _measure(seconds: float) -> dict[str, Any]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    levels: dict[str, dict[int, dict[str, Any]]] = {"gRPC": {}, "REST": {}}
    async with AsyncExitStack() as opened:
        stack = await opened.enter_async_context(running_stack(_MODEL))
        channels = [
            await opened.enter_async_context(grpc.aio.insecure_channel(stack.gateway, options=_OPTIONS))
            for _ in range(_CONNECTIONS)
        ]
        client = await opened.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=_TIMEOUT_S, limits=limits)
        )
        protocols = {"gRPC": _by_grpc(channels), "REST": await _by_rest(client)}
        for callers in _CALLERS:
            for name, ask in protocols.items():
                levels[name][callers] = await _level(ask, callers, seconds)
                print(name, callers, levels[name][callers], flush=True)
    return {
        "tensor": {"datatype": "INT64", "shape": _IDS.shape, "bytes": _IDS.nbytes, "json_bytes": len(_json_body())},
        "seconds_each": seconds,
        "levels": levels,
        "knees": {name: _knee(of_each) for name, of_each in levels.items()},
        "most_per_s": {
            name: max(level["answers_per_s"] for level in of_each.values()) for name, of_each in levels.items()
        },
    }


def _by_grpc(channels: list[grpc.aio.Channel]) -> Ask:
    request = pb.ModelInferRequest(model_name=_MODEL)
    add_input(request, Tensor("input_ids", "INT64", _IDS))
    sent = request.raw_input_contents[0]
    stubs = [GRPCInferenceServiceStub(channel) for channel in channels]
    turn = 0

    async def ask() -> str:
        nonlocal turn
        turn += 1
        try:
            response = await stubs[turn % len(stubs)].ModelInfer(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return _OK if list(response.raw_output_contents) == [sent] else "wrong"

    return ask


async def _by_rest(client: httpx2.AsyncClient) -> Ask:
    body, path = _json_body(), f"/v2/models/{_MODEL}/infer"
    first = (await client.post(path, content=body)).content
    if orjson.loads(first)["outputs"][0]["data"] != _IDS.ravel().tolist():
        raise RuntimeError("REST does not answer with what was sent")

    async def ask() -> str:
        try:
            response = await client.post(path, content=body)
        except httpx2.HTTPError as error:
            return type(error).__name__
        if response.status_code != 200:
            return str(response.status_code)
        return _OK if response.content == first else "wrong"

    return ask


def _json_body() -> bytes:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": _IDS.shape, "data": _IDS.ravel().tolist()}
    return orjson.dumps({"inputs": [tensor]})


async def _level(ask: Ask, callers: int, seconds: float) -> dict[str, Any]:
    """Runs a number of callers for a time; its first quarter is not counted."""
    ended: list[Ended] = []
    begin = time.monotonic() + seconds / 4
    end = time.monotonic() + seconds

    async def call_again_and_again() -> None:
        while (started := time.monotonic()) < end:
            status = await ask()
            now = time.monotonic()
            ended.append(Ended(now, status, now - started))

    await asyncio.gather(*(call_again_and_again() for _ in range(callers)))
    counted = [one for one in ended if begin <= one.at < end]
    took_ms = [1000 * one.took_s for one in counted if one.status == _OK]
    return {
        "answers_per_s": round(len(took_ms) / (end - begin), 1),
        "p50_ms": round(quantile(took_ms, 0.5), 1),
        "p99_ms": round(quantile(took_ms, 0.99), 1),
        "statuses": dict(Counter(one.status for one in ended)),
    }


def _knee(levels: dict[int, dict[str, Any]]) -> int:
    """The fewest callers beyond which no level gives 10 % more answers."""
    rates = {callers: float(level["answers_per_s"]) for callers, level in levels.items()}
    return next(
        callers
        for callers in rates
        if max(rate for more, rate in rates.items() if more >= callers) < _MORE * rates[callers]
    )


if __name__ == "__main__":
    main()
