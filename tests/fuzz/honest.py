"""16 honest streams and 16 honest unary callers: the neighbours of an attack.

Streams are `Generate`, `ModelStreamInfer` and streamed chats; unary calls are `ModelInfer` of a small tensor,
whole completions and readiness. Each caller waits a little between its calls, so that the stack is busy
and not full. gRPC callers share two connections, as callers behind a proxy do. Every answer is compared with the first
one of its kind: greedy text is the same each time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import httpx2

from bench.statistics import quantile
from headrace.oip.tensors import decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, each, text_request
from tests.waiting import until

_MODEL, _PROMPT, _TOKENS = "storyteller", "Once upon a time", 16
_LIMIT_S = 30.0  # An honest caller's timeout.
_PAUSE_S = 0.3


@dataclass
class Figures:
    """The figures of one phase: seconds of unary calls, to first tokens, and between pieces; errors as text."""

    unary_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: int = 0

    def p99_ms(self) -> dict[str, float]:
        """The 99th percentile of each kind that has any."""
        kinds = {"unary": self.unary_s, "first token": self.first_s, "gap": self.gaps_s}
        return {name: round(1000 * quantile(values, 0.99), 1) for name, values in kinds.items() if values}


class Honest:
    """The callers; an async context manager. `figures` has those of the present phase."""

    def __init__(self, gateway: str) -> None:
        self._channels = [channel(gateway), channel(gateway)]
        self._http = httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=_LIMIT_S)
        self._expected: dict[str, Any] = {}
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.figures = Figures()

    def phase(self) -> Figures:
        """Begins a new phase; returns the figures that it fills. Calls count in the phase in which they end."""
        self.figures = Figures()
        return self.figures

    async def settled(self, phase: Figures) -> None:
        """Waits until as many calls as there are callers have ended; fails if that takes too long."""
        begun = phase.answers + len(phase.errors)
        await until(lambda: phase.answers + len(phase.errors) >= begun + len(self._tasks), 2 * _LIMIT_S)

    async def _stream(self, name: str, pieces: Callable[[], AsyncIterator[str]]) -> None:
        async def once() -> None:
            begun = last = time.monotonic()
            text, gaps, first_s = "", [], None
            async for piece in pieces():
                now = time.monotonic()
                if first_s is None:
                    first_s = now - begun
                else:
                    gaps.append(now - last)
                last = now
                text += piece
            if first_s is None:
                raise ValueError("the answer is empty")
            self._compare(name, text)
            self.figures.first_s.append(first_s)
            self.figures.gaps_s += gaps

        await self._repeat(name, once)

    async def _unary(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        async def once() -> None:
            begun = time.monotonic()
            self._compare(name, await call())
            self.figures.unary_s.append(time.monotonic() - begun)

        await self._repeat(name, once)

    async def _repeat(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        while not self._enough.is_set():
            try:
                async with asyncio.timeout(_LIMIT_S):
                    await once()
                self.figures.answers += 1
            except grpc.aio.AioRpcError as error:
                self.figures.errors.append(f"{name}: {error.code().name} {error.details()}")
            except (httpx2.HTTPError, ValueError, TimeoutError, KeyError) as error:
                self.figures.errors.append(f"{name}: {error!r}")
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._enough.wait()

    def _compare(self, name: str, answer: Any) -> None:
        if self._expected.setdefault(name, answer) != answer:
            raise ValueError(f"another answer than before: {answer!r}")

    async def _generate(self, opened: grpc.aio.Channel) -> AsyncIterator[str]:
        fields = {"model": _MODEL, "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        call = headrace_pb2_grpc.TextGenerationStub(opened).Generate(headrace_pb2.GenerateRequest(**fields))
        async for response in call:
            yield response.text

    async def _stream_infer(self, opened: grpc.aio.Channel) -> AsyncIterator[str]:
        request = text_request(_MODEL, _PROMPT, max_tokens=_TOKENS, temperature=0)
        request.parameters["ignore_eos"].bool_param = True
        async for answer in GRPCInferenceServiceStub(opened).ModelStreamInfer(each(request)):
            if answer.error_message:
                raise ValueError(answer.error_message)
            yield decode_outputs(answer.infer_response)["text_output"].array[0].decode()

    async def _chat(self) -> AsyncIterator[str]:
        body = {"model": _MODEL, "messages": [{"role": "user", "content": _PROMPT}], "stream": True}
        body |= {"max_tokens": _TOKENS, "temperature": 0}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {await response.aread()!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(event["error"])
                    yield event["choices"][0]["delta"].get("content") or ""

    async def _tensor(self, opened: grpc.aio.Channel) -> bytes:
        request = pb.ModelInferRequest(model_name="identity")
        request.inputs.add(name="x", datatype="INT64", shape=[8])
        request.raw_input_contents.append(bytes(range(64)))
        answer = await GRPCInferenceServiceStub(opened).ModelInfer(request, timeout=_LIMIT_S)
        return answer.raw_output_contents[0]

    async def _completion(self) -> str:
        body = {"model": _MODEL, "prompt": _PROMPT, "max_tokens": 2, "temperature": 0}
        return self._json(await self._http.post("/v1/completions", json=body))["choices"][0]["text"]

    async def _ready(self) -> int:
        response = await self._http.get("/v2/health/ready")
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.content!r}")
        return response.status_code

    @staticmethod
    def _json(response: httpx2.Response) -> Any:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.content!r}")
        return response.json()

    async def __aenter__(self) -> Self:
        first, second = self._channels
        streams = [
            *[("Generate", lambda: self._generate(first))] * 4,
            *[("Generate, second connection", lambda: self._generate(second))] * 4,
            *[("ModelStreamInfer", lambda: self._stream_infer(second))] * 4,
            *[("chat completions", self._chat)] * 4,
        ]
        unary = [
            *[("ModelInfer", lambda: self._tensor(first))] * 8,
            *[("completions", self._completion)] * 4,
            *[("readiness", self._ready)] * 4,
        ]
        callers = [self._stream(*one) for one in streams] + [self._unary(*one) for one in unary]
        self._tasks = [asyncio.create_task(caller, name="honest caller") for caller in callers]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._enough.set()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)
        await self._http.aclose()
        for opened in self._channels:
            await opened.close()
