"""A gateway that streams as fast as it is read: `Generate` with a message every PAUSE_S, nothing else.

`python -m tests.support.streaming_server PAUSE_S` prints its address.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from headrace_protos import headrace_pb2, headrace_pb2_grpc


class Generation(headrace_pb2_grpc.TextGenerationServicer):
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[headrace_pb2.GenerateResponse]:  # noqa: N802
        last = request.max_tokens - 1
        for token in range(request.max_tokens):
            yield headrace_pb2.GenerateResponse(
                text=" word", token_ids=[token], finish_reason="length" if token == last else None
            )
            await asyncio.sleep(self._pause_s)


async def serve(pause_s: float) -> None:
    server = grpc.aio.server()
    headrace_pb2_grpc.add_TextGenerationServicer_to_server(Generation(pause_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(float(sys.argv[1])))
