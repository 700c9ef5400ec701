"""Replays the streams of a source at another stack, a few at a time: one call of `Generate` for each, over one channel.

One task reads records and queues those that can be replayed; `concurrency` workers replay and compare them. The queue
is as long as there are workers, so that records are read no faster than they are replayed. Calls have the key of
HEADRACE_AGAINST_KEY, or without it that of HEADRACE_KEY.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from headrace.errors import RETRY_AFTER_MS, StartupError
from headrace.rpc.client.caller_key import headers
from headrace_protos.headrace_pb2 import GenerateRequest, PayloadRecord
from headrace_protos.headrace_pb2_grpc import TextGenerationStub
from headrace_protos.inference_pb2 import ModelConfigRequest, ServerLiveRequest
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_runner.replay.records import LoggedStream, select
from headrace_runner.replay.results import Answer, Difference, Results, compare

AGAINST_KEY = "HEADRACE_AGAINST_KEY"
_TIMEOUT_S = 10.0
_MAX_MESSAGE = 64 * 1024 * 1024
_TTFT_MS = "x-ttft-ms"

Found = Callable[[LoggedStream, "Difference | FailedError"], None]


class FailedError(Exception):
    """A replayed request failed: with a gRPC status and its message."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def open_channel(address: str) -> grpc.aio.Channel:
    options = (("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.enable_http_proxy", 0))
    return grpc.aio.insecure_channel(address, options=options)


class Target:
    """See the module; `timeout_s` is the deadline of each request, its repetitions included."""

    def __init__(self, address: str, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self.address = address
        self._inference: Any = GRPCInferenceServiceStub(channel)
        self._text: Any = TextGenerationStub(channel)
        self._timeout_s = timeout_s
        self._metadata = tuple((headers(AGAINST_KEY) or headers()).items())

    async def check(self) -> None:
        """Raises StartupError unless a stack answers."""
        try:
            await self._inference.ServerLive(ServerLiveRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise StartupError(f"no stack answers at {self.address}: {error.code().name}: {error.details()}") from None

    async def fingerprint(self, model: str) -> str:
        """The fingerprint of the model's weights there; empty if it has none, or if there is no such model."""
        try:
            answer = await self._inference.ModelConfig(
                ModelConfigRequest(name=model), timeout=_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return ""  # The calls of Generate fail too, and are reported.
        return str(answer.config.parameters["fingerprint"].string_value)

    async def generate(self, request: GenerateRequest) -> Answer:
        """The answer to a request; a refusal for lack of capacity is repeated after its `retry-after-ms`.

        Raises FailedError.
        """
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._generate(request, give_up_at - time.monotonic())
            except grpc.aio.AioRpcError as error:
                pause_s = _retry_after_s(error)
                if pause_s is None or time.monotonic() + pause_s >= give_up_at:
                    raise FailedError(error.code().name, error.details() or "") from None
            await asyncio.sleep(pause_s)

    async def _generate(self, request: GenerateRequest, timeout_s: float) -> Answer:
        token_ids: list[int] = []
        texts: list[str] = []
        finish_reason = ""
        begun = time.monotonic()
        call = self._text.Generate(request, timeout=timeout_s, metadata=self._metadata)
        async for response in call:
            token_ids += response.token_ids
            texts.append(response.text)
            finish_reason = response.finish_reason or finish_reason
        duration_ms = (time.monotonic() - begun) * 1000
        trailers = dict(await call.trailing_metadata() or ())
        ttft = trailers.get(_TTFT_MS)
        ttft_ms = None if ttft is None else float(ttft)
        return Answer(tuple(token_ids), "".join(texts), finish_reason, ttft_ms, duration_ms)


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The pause before the request may be repeated; None if it must not be."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    value = dict(error.trailing_metadata() or ()).get(RETRY_AFTER_MS)
    return int(value) / 1000 if isinstance(value, str) and value.isdecimal() else None


class Replay:
    """One run; `limit` is the most streams that it replays, `found` is called with each difference and each failure."""

    def __init__(self, target: Target, *, concurrency: int, limit: int, from_text: bool, found: Found) -> None:
        self.results = Results()
        self._target = target
        self._concurrency = concurrency
        self._limit = limit
        self._from_text = from_text
        self._found = found
        self._queue: asyncio.Queue[LoggedStream | None] = asyncio.Queue(concurrency)

    async def run(self, records: AsyncGenerator[PayloadRecord, None]) -> Results:
        """Reads and replays all records, and closes `records`; raises what reading them raises."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._concurrency):
                    tasks.create_task(self._work(), name=f"replay {number}")
                tasks.create_task(self._read(records), name="read records")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for model in self.results.fingerprints():
            self.results.weights[model] = await self._target.fingerprint(model)
        return self.results

    async def _read(self, records: AsyncGenerator[PayloadRecord, None]) -> None:
        results, selected = self.results, 0
        async with aclosing(records):
            async for record in records:
                stream = select(record, self._from_text)
                if isinstance(stream, str):
                    results.not_comparable[stream] += 1
                    continue
                if selected == self._limit:
                    results.limit_reached = True
                    break
                selected += 1
                results.add_weights(stream)
                await self._queue.put(stream)
        for _ in range(self._concurrency):
            await self._queue.put(None)

    async def _work(self) -> None:
        while (stream := await self._queue.get()) is not None:
            try:
                answer = await self._target.generate(stream.request)
            except FailedError as failure:
                self.results.add_failure(stream, failure.status, str(failure))
                self._found(stream, failure)
                continue
            difference = compare(stream, answer)
            self.results.add(stream, answer, difference)
            if difference is not None:
                self._found(stream, difference)
