"""Ways into the stack for the tests of traces: each sends its ids, and can leave after its first chunk."""

import asyncio
import http.client
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace.oip.parameters import set_parameters
from headrace_protos import headrace_pb2
from headrace_protos.headrace_pb2_grpc import TextGenerationStub
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, each, http_request, text_request
from tests.system.request_outcome import in_thread

MODEL, PROMPT = "storyteller", "Once upon a time"


@dataclass
class TracedRequest:
    """A generation with its caller's ids; `begun` is set at its first chunk, which a whole answer does not have."""

    request_id: str
    traceparent: str
    parameters: Mapping[str, Any]
    timeout_s: float = 60.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    leave: Callable[[], object] = lambda: None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", self.request_id), ("traceparent", self.traceparent))


@dataclass(frozen=True)
class AnswerHead:
    """The headers of an answer, or its initial metadata."""

    headers: Mapping[str, str]


@dataclass(frozen=True)
class TracedWay:
    """`method` is the transformer's; `streams`: chunk by chunk; `has_status`: every error is the call's status."""

    method: str
    protocol: str
    send: Callable[[str, TracedRequest], Awaitable[AnswerHead]]
    streams: bool
    has_status: bool = True
    operation: str = "text_completion"


async def _generate(gateway: str, request: TracedRequest) -> AnswerHead:
    message = headrace_pb2.GenerateRequest(model=MODEL, prompt=PROMPT, **request.parameters)
    async with channel(gateway) as open_channel:
        call = TextGenerationStub(open_channel).Generate(message, timeout=request.timeout_s, metadata=request.metadata)
        return await _read(call, request)


async def _stream_infer(gateway: str, request: TracedRequest) -> AnswerHead:
    async with channel(gateway) as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        call = stub.ModelStreamInfer(
            each(_infer_request(request)), timeout=request.timeout_s, metadata=request.metadata
        )
        return await _read(call, request)


def _infer_request(request: TracedRequest) -> Any:
    message = text_request(MODEL, PROMPT)
    message.id = request.request_id
    set_parameters(message.parameters, request.parameters)
    return message


async def _read(call: Any, request: TracedRequest) -> AnswerHead:
    request.leave = call.cancel
    try:
        async for _ in call:
            request.begun.set()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return AnswerHead({})
    return AnswerHead(dict(await call.initial_metadata()))


def _rest(path: str, body: Callable[[], Mapping[str, Any]]) -> Callable[[str, TracedRequest], Awaitable[AnswerHead]]:
    async def send_rest(gateway: str, request: TracedRequest) -> AnswerHead:
        loop = asyncio.get_running_loop()

        def on_piece() -> None:
            loop.call_soon_threadsafe(request.begun.set)

        headers = dict(request.metadata) | {"x-timeout-ms": str(int(1000 * request.timeout_s))}
        written = {**body(), **request.parameters}
        connected: list[http.client.HTTPConnection] = []

        def leave() -> None:
            if connected[0].sock is not None:
                connected[0].sock.shutdown(socket.SHUT_RDWR)

        request.leave = leave
        try:
            answer = await in_thread(
                *(http_request, gateway, "POST", path, written, headers, on_piece), connected.append
            )
        except (http.client.HTTPException, OSError):
            return AnswerHead({})
        return AnswerHead(answer.headers)

    return send_rest


def _chat(streams: bool) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "stream": streams}


WAYS: dict[str, TracedWay] = {
    "Generate": TracedWay("headrace.v1.TextGeneration/Generate", "grpc", _generate, streams=True),
    "ModelStreamInfer": TracedWay(
        *("inference.GRPCInferenceService/ModelStreamInfer", "grpc", _stream_infer), streams=True, has_status=False
    ),
    "chat, events": TracedWay(
        *("headrace.rest.v1.OpenAI/ChatCompletions", "http", _rest("/v1/chat/completions", _chat(True))),
        streams=True,
        operation="chat",
    ),
    "chat": TracedWay(
        *("headrace.rest.v1.OpenAI/ChatCompletions", "http", _rest("/v1/chat/completions", _chat(False))),
        streams=False,
        operation="chat",
    ),
}
