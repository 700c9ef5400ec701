"""Sends requests of every kind to one gateway and records what their callers received.

`Client.send` never raises for failures of the stack: they are in the `Call` that it returns. Times are
those of time.monotonic().
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any, NamedTuple, Self

import grpc
import httpx2
import numpy as np

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.requests import DATE_MODEL, TENSOR_MODEL, TEXT_MODEL, VECTOR_MODEL, Request, Story
from tests.system.calls import web_frames

OK, BROKEN, HUNG = "OK", "broken", "hung"  # Beside these a status is gRPC's name or HTTP's number.
SLOW_S = 0.05
_HUNG_S = 30.0  # Beyond the request's own limit.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class Piece(NamedTuple):
    """The contents of one message or event."""

    at: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    vector: tuple[float, ...] = ()


class NotAnsweredError(Exception):
    """The end of a failed call."""

    def __init__(self, status: str, hop: str | None = None, message: str = "") -> None:
        super().__init__(status, hop, message)
        self.status, self.hop, self.message = status, hop, message


@dataclass
class Call:
    """One request and its outcome; `left`: its caller cancelled it."""

    request: Request
    begun: float
    ended: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    status: str = OK
    hop: str | None = None
    message: str = ""
    left: bool = False

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.pieces[-1].finish_reason if self.pieces else None

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two pieces of the answer."""
        return max((after.at - before.at for before, after in pairwise(self.pieces)), default=0.0)

    @property
    def first_wait_s(self) -> float:
        """The time until the first piece."""
        return self.pieces[0].at - self.begun if self.pieces else self.ended - self.begun


class Client:
    """Connections to one gateway; an async context manager."""

    def __init__(self, gateway: str, connections: int = 4) -> None:
        self._channels = [grpc.aio.insecure_channel(gateway, options=_OPTIONS) for _ in range(connections)]
        self._next = cycle(self._channels)
        # No connection is reused: one that the gateway closed while it was idle would look like a broken answer.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=None, limits=limits)

    async def send(self, request: Request, call: Call | None = None) -> Call:
        """Makes the request and reads its answer as its caller would; `call` is filled in meanwhile."""
        call = call or Call(request, time.monotonic())
        try:
            async with asyncio.timeout(request.timeout_s + _HUNG_S), aclosing(self.pieces(request)) as pieces:
                async for piece in pieces:
                    call.pieces.append(piece)
                    if request.manner == "leaves" and len(call.pieces) >= request.pieces:
                        call.left = True
                        break
                    if request.manner == "reads slowly":
                        await asyncio.sleep(SLOW_S)
        except NotAnsweredError as error:
            call.status, call.hop, call.message = error.status, error.hop, error.message
        except TimeoutError:
            call.status = HUNG
        call.ended = time.monotonic()
        return call

    async def pieces(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The contents of the answer as they come; NotAnsweredError where the call fails. Closing it ends the call."""
        try:
            async with aclosing(_WAYS[request.way](self, request)) as pieces:
                async for piece in pieces:
                    yield piece
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            raise NotAnsweredError(error.code().name, metadata.get("x-failed-hop"), error.details() or "") from None
        except httpx2.HTTPError as error:
            raise NotAnsweredError(BROKEN, None, repr(error)) from None

    def channel(self) -> grpc.aio.Channel:
        return next(self._next)

    async def post(self, request: Request, path: str, body: Any) -> AsyncGenerator[str, None]:
        """Lines of the answer; NotAnsweredError unless the status is 200."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            self.posted(request, path, content, "application/json") as response,
            aclosing(response.aiter_lines()) as lines,
        ):
            async for line in lines:
                if line:
                    yield line

    @asynccontextmanager
    async def posted(
        self, request: Request, path: str, content: bytes, content_type: str
    ) -> AsyncIterator[httpx2.Response]:
        """The answer, unread; NotAnsweredError unless the status is 200."""
        headers = {
            "content-type": content_type,
            "x-request-id": request.name,
            "x-timeout-ms": str(int(request.timeout_s * 1000)),
        }
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise NotAnsweredError(str(response.status_code), response.headers.get("x-failed-hop"), text)
            yield response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        for channel in self._channels:
            await channel.close()


def text_request(story: Story, name: str) -> headrace_pb2.GenerateRequest:
    """The `Generate` request for the story."""
    prompt: dict[str, Any] = {"prompt": story.prompt}
    if story.is_chat:
        prompt = {"messages": [headrace_pb2.ChatMessage(role="user", content=story.prompt)]}
    return headrace_pb2.GenerateRequest(
        model=story.model, request_id=name, stop=story.stop, **story.parameters, **prompt
    )


async def _generate(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    call = headrace_pb2_grpc.TextGenerationStub(client.channel()).Generate(
        text_request(request.required_story, request.name), timeout=request.timeout_s
    )
    async with aclosing(_responses(call)) as responses:
        async for response in responses:
            yield Piece(time.monotonic(), response.text, tuple(response.token_ids), response.finish_reason or None)


async def _model_stream_infer(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    story = request.required_story
    message = pb.ModelInferRequest(model_name=story.model, id=request.name)
    add_input(message, bytes_tensor("text_input", [story.prompt.encode()]))
    set_parameters(message.parameters, story.parameters)
    # The one request goes out with the half-close: this keeps the status of a refusal (grpc/grpc#36066).
    method = client.channel().unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    call = method(message, timeout=request.timeout_s, metadata=(("triton_grpc_error", "true"),))
    async with aclosing(_responses(call)) as responses:
        async for response in responses:
            answer = response.infer_response
            text = decode_outputs(answer)["text_output"].array[0].decode() if answer.outputs else ""
            final = answer.parameters["triton_final_response"].bool_param
            yield Piece(time.monotonic(), text, finish_reason="final" if final else None)


async def _responses(call: Any) -> AsyncGenerator[Any, None]:
    """A call's responses; closing it cancels the call."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def _events(
    path: str, text_of: Callable[[Any], str | None]
) -> Callable[[Client, Request], AsyncGenerator[Piece, None]]:
    async def way(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
        story = request.required_story
        prompt: Mapping[str, Any] = {"prompt": story.prompt}
        if story.is_chat:
            prompt = {"messages": [{"role": "user", "content": story.prompt}]}
        body = {"model": story.model, "stream": True, "stop": list(story.stop), **prompt, **story.parameters}
        ended = False
        async with aclosing(client.post(request, path, body)) as lines:
            async for line in lines:
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise NotAnsweredError(event["error"]["code"].upper(), None, event["error"]["message"])
                (choice,) = event["choices"]
                yield Piece(time.monotonic(), text_of(choice) or "", finish_reason=choice["finish_reason"])
        if not ended:
            raise NotAnsweredError(BROKEN, None, "no [DONE]")

    return way


async def _grpc_web(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    message = text_request(request.required_story, request.name).SerializeToString()
    frame, body, count = b"\0" + len(message).to_bytes(4, "big") + message, b"", 0
    path, content_type = "/headrace.v1.TextGeneration/Generate", "application/grpc-web+proto"
    async with client.posted(request, path, frame, content_type) as response:
        async for piece in response.aiter_raw():
            body += piece
            messages, _ = web_frames(body)
            for whole in messages[count:]:
                yield Piece(time.monotonic(), headrace_pb2.GenerateResponse.FromString(whole).text)
            count = len(messages)


def _pieces_by_rest(path: str, prompt: str, text: str) -> Callable[[Client, Request], AsyncGenerator[Piece, None]]:
    """Lines or events whose texts are the field `text`; the request's is the field `prompt`."""

    async def way(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
        story = request.required_story
        body = {prompt: story.prompt, **story.parameters} | ({"model": story.model} if "/v2/" not in path else {})
        async with aclosing(client.post(request, path.format(model=story.model), body)) as lines:
            async for line in lines:
                yield Piece(time.monotonic(), json.loads(line.removeprefix("data: "))[text])

    return way


async def _model_infer(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    message = pb.ModelInferRequest(model_name=TENSOR_MODEL, id=request.name)
    add_input(message, Tensor("x", "FP32", request.numbers))
    stub = GRPCInferenceServiceStub(client.channel())
    answer = decode_outputs(await stub.ModelInfer(message, timeout=request.timeout_s))["x"]
    yield Piece(time.monotonic(), finish_reason="final", vector=tuple(answer.array.tolist()))


async def _embeddings(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    body = {"model": VECTOR_MODEL, "input": request.sentence}
    async with aclosing(client.post(request, "/v1/embeddings", body)) as lines:
        whole = json.loads("".join([line async for line in lines]))
    yield Piece(time.monotonic(), finish_reason="final", vector=tuple(whole["data"][0]["embedding"]))


async def _refused(client: Client, request: Request) -> AsyncGenerator[Piece, None]:
    """A wrong request; gives a piece for each response if it was answered nevertheless."""
    async for _ in _WRONG[request.variant](client, request):
        yield Piece(time.monotonic())


def _wrong_generate(**fields: Any) -> Callable[[Client, Request], AsyncIterator[Any]]:
    def call(client: Client, request: Request) -> AsyncIterator[Any]:
        message = headrace_pb2.GenerateRequest(
            **{"model": TEXT_MODEL, "prompt": "Once", "request_id": request.name, **fields}
        )
        return _responses(
            headrace_pb2_grpc.TextGenerationStub(client.channel()).Generate(message, timeout=request.timeout_s)
        )

    return call


def _wrong_post(path: str, body: Any) -> Callable[[Client, Request], AsyncIterator[Any]]:
    return lambda client, request: client.post(request, path, body)


async def _wrong_tensor(client: Client, request: Request) -> AsyncIterator[Any]:
    message = pb.ModelInferRequest(model_name=TEXT_MODEL, id=request.name)
    add_input(message, Tensor("text_input", "FP32", np.zeros(1, np.float32)))
    yield await GRPCInferenceServiceStub(client.channel()).ModelInfer(message, timeout=request.timeout_s)


_QUESTION = [{"role": "user", "content": "date: 3 Mar 2021"}]
_WRONG: Mapping[str, Callable[[Client, Request], AsyncIterator[Any]]] = {
    "temperature": _wrong_generate(temperature=-1.0),
    "unknown model": _wrong_generate(model="nobody"),
    "too long": _wrong_generate(prompt="once " * 1500),
    "wrong endpoint": _wrong_post("/v1/chat/completions", {"model": DATE_MODEL, "messages": _QUESTION}),
    "tensor": _wrong_tensor,
    "not JSON": _wrong_post("/v1/completions", b"{"),
}
_WAYS: Mapping[str, Callable[[Client, Request], AsyncGenerator[Piece, None]]] = {
    "Generate": _generate,
    "ModelStreamInfer": _model_stream_infer,
    "completions": _events("/v1/completions", lambda choice: choice["text"]),
    "chat completions": _events("/v1/chat/completions", lambda choice: choice["delta"].get("content")),
    "generate_stream": _pieces_by_rest("/v2/models/{model}/generate_stream", "text_input", "text_output"),
    "headrace generate": _pieces_by_rest("/headrace/v1/generate", "prompt", "text"),
    "gRPC-Web": _grpc_web,
    "ModelInfer": _model_infer,
    "embeddings": _embeddings,
    "refused": _refused,
}
