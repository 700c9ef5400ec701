"""The loss of the payload log when the transformer is killed: chunks that callers received and no record has.

A whole stack, its model paced at 10 ms a step, and 32 streams; once each has some chunks the transformer gets SIGKILL.
Then each record is compared with what its caller received: each missing chunk is 10 ms of output that was not written
before the kill. The promise is 50 ms, and no lost request.

`python -m bench.payload_loss` writes bench/results/payload_loss.json; 3 minutes.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import grpc

from bench.runs import PROMPT, parser, running_stack, write
from bench.statistics import quantile
from millrace_protos import millrace_pb2, millrace_pb2_grpc
from runner.stack import Stack

_MODEL = "storyteller"
_PACE_MS = 10
_PROMISE_MS = 50
_STREAMS = 32
_LEAST_CHUNKS = 20  # Chunks that every caller has before the kill.
_TIMEOUT_S = 60.0


def main() -> None:
    options = parser(__doc__, "payload_loss")
    options.add_argument("--kills", type=int, default=10)
    arguments = options.parse_args()
    report = asyncio.run(_measure(arguments.kills))
    write(arguments.out, report)
    print(json.dumps(report, indent=2))


async def _measure(kills: int) -> dict[str, Any]:
    environment = {"predictor": {"PACE_MS": str(_PACE_MS)}}
    async with running_stack(_MODEL, predictor="paced_predictor", environment=environment) as stack:
        missing = [lost for kill in range(kills) for lost in await _kill_once(stack, kill)]
    lost = [chunks * _PACE_MS for chunks in missing if chunks is not None]
    return {
        "pace_ms": _PACE_MS,
        "promise_ms": _PROMISE_MS,
        "streams_cut": len(missing),
        "requests_without_a_record": missing.count(None),
        "lost_ms": {"median": quantile(lost, 0.5), "p99": quantile(lost, 0.99), "most": max(lost)},
    }


async def _kill_once(stack: Stack, kill: int) -> list[int | None]:
    """The number of chunks that each stream's record lacks; None if there is no record."""
    names = [f"cut-{kill}-{stream}" for stream in range(_STREAMS)]
    received = dict.fromkeys(names, 0)
    all_run = asyncio.Event()

    async def stream(name: str) -> None:
        request = millrace_pb2.GenerateRequest(
            model=_MODEL, prompt=PROMPT, max_tokens=900, ignore_eos=True, request_id=name
        )
        async with grpc.aio.insecure_channel(stack.gateway) as channel:
            with suppress(grpc.aio.AioRpcError):
                async for _ in millrace_pb2_grpc.TextGenerationStub(channel).Generate(request):
                    received[name] += 1
                    if min(received.values()) >= _LEAST_CHUNKS:
                        all_run.set()

    async with asyncio.timeout(_TIMEOUT_S):
        streams = [asyncio.create_task(stream(name)) for name in names]
        await all_run.wait()
        await asyncio.sleep(random.uniform(0, 0.1))  # noqa: S311  # Anywhere between two writes.
        await stack.kill("transformer")
        await asyncio.gather(*streams)
        await stack.wait_ready()
        # Records of a spool that was taken over arrive in order: with the last, the first is there.
        recorded = await _chunks_recorded(stack, names)
    return [None if name not in recorded else max(0, received[name] - recorded[name]) for name in names]


async def _chunks_recorded(stack: Stack, names: list[str]) -> dict[str, int]:
    recorded: dict[str, int] = {}
    async with grpc.aio.insecure_channel(stack.addresses["logger"]) as channel:
        stub = millrace_pb2_grpc.PayloadLogStub(channel)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S / 4):
                while len(recorded) < len(names):
                    await asyncio.sleep(0.2)
                    for name in names:
                        async for record in stub.Query(millrace_pb2.QueryPayloadsRequest(request_id=name)):
                            if record.status in ("ABORTED", "OK"):  # Not the gateway's records.
                                recorded[name] = len(record.chunks)
    return recorded


if __name__ == "__main__":
    main()
