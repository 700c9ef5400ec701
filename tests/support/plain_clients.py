"""Plain clients of grpc.aio and of httpx that measure first tokens and gaps, without any load test around them.

`python -m tests.support.plain_clients grpc|events GATEWAY CLIENTS SECONDS` prints the times in milliseconds as JSON:
{"ttft": […], "gap": […]}. Each kind has its own process: a busy event loop would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import pairwise

import grpc
import httpx2
import uvloop

from headrace_protos import headrace_pb2, headrace_pb2_grpc

PROMPT, TOKENS, PAUSE_S = "Once upon a time", 12, 0.3


class Moments:
    def __init__(self) -> None:
        self.ttft: list[float] = []
        self.gap: list[float] = []

    def note(self, times: list[float]) -> None:
        """Records the times of a request and of its messages; the first request of each client opens its connection."""
        self.ttft.append(1000 * (times[1] - times[0]))
        self.gap.extend(1000 * (later - earlier) for earlier, later in pairwise(times[1:]))


async def read_messages(gateway: str, until: float, moments: Moments) -> None:
    request = headrace_pb2.GenerateRequest(model="storyteller", prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True)
    async with grpc.aio.insecure_channel(gateway, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        while time.monotonic() < until:
            times = [time.perf_counter()]
            async for response in headrace_pb2_grpc.TextGenerationStub(channel).Generate(request):
                if response.token_ids:
                    times.append(time.perf_counter())
            moments.note(times)
            await asyncio.sleep(PAUSE_S)


async def read_events(gateway: str, until: float, moments: Moments) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "storyteller", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=60) as client:
        while time.monotonic() < until:
            times = [time.perf_counter()]
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                        times.append(time.perf_counter())
            moments.note(times)
            await asyncio.sleep(PAUSE_S)


async def main(kind: str, gateway: str, clients: int, seconds: float) -> None:
    read = {"grpc": read_messages, "events": read_events}[kind]
    moments, until = Moments(), time.monotonic() + seconds
    await asyncio.gather(*(read(gateway, until, moments) for _ in range(clients)))
    print(json.dumps({"ttft": moments.ttft, "gap": moments.gap}))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
