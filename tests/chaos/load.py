"""Makes requests of every kind at one gateway and tells what their callers were told.

`Client.tell` never raises for what the stack does: whatever became of the request is in what it gives. Times are
those of time.monotonic().
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
import httpx2
import numpy as np

from millrace.oip.parameters import set_parameters
from millrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2, millrace_pb2_grpc
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.asks import DATE_MODEL, TENSOR_MODEL, TEXT_MODEL, VECTOR_MODEL, Ask, Story

OK, BROKEN, HUNG = "OK", "broken", "hung"  # Beside these a status is gRPC's name or HTTP's number.
SLOW_S = 0.05
_HUNG_S = 30.0  # Beyond the request's own limit.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class Piece(NamedTuple):
    """What one message or event brought."""

    at: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    vector: tuple[float, ...] = ()


class NotAnsweredError(Exception):
    """How a call ended that did not end well."""

    def __init__(self, status: str, hop: str | None = None, message: str = "") -> None:
        super().__init__(status, hop, message)
        self.status, self.hop, self.message = status, hop, message


@dataclass
class Told:
    """What became of a request; `left`: its caller had enough."""

    ask: Ask
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
        """Between two pieces of the answer."""
        return max((after.at - before.at for before, after in pairwise(self.pieces)), default=0.0)

    @property
    def first_wait_s(self) -> float:
        """Until the first piece."""
        return self.pieces[0].at - self.begun if self.pieces else self.ended - self.begun


class Client:
    """Connections to one gateway; an async context manager."""

    def __init__(self, gateway: str, connections: int = 4) -> None:
        self._channels = [grpc.aio.insecure_channel(gateway, options=_OPTIONS) for _ in range(connections)]
        self._next = cycle(self._channels)
        # None of them is kept: one that the gateway has closed while it was idle would look like an answer that broke.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=None, limits=limits)

    async def tell(self, ask: Ask, told: Told | None = None) -> Told:
        """Makes the request and reads its answer as its caller would; `told` is filled in as it goes on."""
        told = told or Told(ask, time.monotonic())
        try:
            async with asyncio.timeout(ask.timeout_s + _HUNG_S), aclosing(self._answer(ask)) as pieces:
                async for piece in pieces:
                    told.pieces.append(piece)
                    if ask.manner == "leaves" and len(told.pieces) >= ask.pieces:
                        told.left = True
                        break
                    if ask.manner == "reads slowly":
                        await asyncio.sleep(SLOW_S)
        except NotAnsweredError as error:
            told.status, told.hop, told.message = error.status, error.hop, error.message
        except TimeoutError:
            told.status = HUNG
        told.ended = time.monotonic()
        return told

    async def _answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        try:
            async with aclosing(_WAYS[ask.way](self, ask)) as pieces:
                async for piece in pieces:
                    yield piece
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            raise NotAnsweredError(error.code().name, metadata.get("x-failed-hop"), error.details() or "") from None
        except httpx2.HTTPError as error:
            raise NotAnsweredError(BROKEN, None, repr(error)) from None

    def channel(self) -> grpc.aio.Channel:
        return next(self._next)

    async def post(self, ask: Ask, path: str, body: Any) -> AsyncGenerator[str, None]:
        """Lines of the answer; NotAnsweredError unless the status is 200."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {
            "content-type": "application/json",
            "x-request-id": ask.name,
            "x-timeout-ms": str(int(ask.timeout_s * 1000)),
        }
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise NotAnsweredError(str(response.status_code), response.headers.get("x-failed-hop"), said)
            async with aclosing(response.aiter_lines()) as lines:
                async for line in lines:
                    if line:
                        yield line

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()
        for channel in self._channels:
            await channel.close()


def text_request(story: Story, name: str) -> millrace_pb2.GenerateRequest:
    """The `Generate` that tells the story."""
    said: dict[str, Any] = {"prompt": story.prompt}
    if story.is_chat:
        said = {"messages": [millrace_pb2.ChatMessage(role="user", content=story.prompt)]}
    return millrace_pb2.GenerateRequest(model=story.model, request_id=name, stop=story.stop, **story.parameters, **said)


async def _generate(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
    call = millrace_pb2_grpc.TextGenerationStub(client.channel()).Generate(
        text_request(ask.told, ask.name), timeout=ask.timeout_s
    )
    async with aclosing(_responses(call)) as responses:
        async for response in responses:
            yield Piece(time.monotonic(), response.text, tuple(response.token_ids), response.finish_reason or None)


async def _model_stream_infer(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
    story = ask.told
    request = pb.ModelInferRequest(model_name=story.model, id=ask.name)
    add_input(request, bytes_tensor("text_input", [story.prompt.encode()]))
    set_parameters(request.parameters, story.parameters)
    # The one request goes out with the half-close: a refusal keeps its status so (grpc/grpc#36066).
    method = client.channel().unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    call = method(request, timeout=ask.timeout_s, metadata=(("triton_grpc_error", "true"),))
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


def _events(path: str, text_of: Callable[[Any], str | None]) -> Callable[[Client, Ask], AsyncGenerator[Piece, None]]:
    async def way(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
        story = ask.told
        said: Mapping[str, Any] = {"prompt": story.prompt}
        if story.is_chat:
            said = {"messages": [{"role": "user", "content": story.prompt}]}
        body = {"model": story.model, "stream": True, "stop": list(story.stop), **said, **story.parameters}
        ended = False
        async with aclosing(client.post(ask, path, body)) as lines:
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


async def _model_infer(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
    request = pb.ModelInferRequest(model_name=TENSOR_MODEL, id=ask.name)
    add_input(request, Tensor("x", "FP32", ask.numbers))
    stub = GRPCInferenceServiceStub(client.channel())
    answer = decode_outputs(await stub.ModelInfer(request, timeout=ask.timeout_s))["x"]
    yield Piece(time.monotonic(), finish_reason="final", vector=tuple(answer.array.tolist()))


async def _embeddings(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
    body = {"model": VECTOR_MODEL, "input": ask.sentence}
    async with aclosing(client.post(ask, "/v1/embeddings", body)) as lines:
        whole = json.loads("".join([line async for line in lines]))
    yield Piece(time.monotonic(), finish_reason="final", vector=tuple(whole["data"][0]["embedding"]))


async def _refused(client: Client, ask: Ask) -> AsyncGenerator[Piece, None]:
    """A request that is wrong; gives what came where it was answered all the same."""
    async for _ in _WRONG[ask.variant](client, ask):
        yield Piece(time.monotonic())


def _wrong_generate(**fields: Any) -> Callable[[Client, Ask], AsyncIterator[Any]]:
    def call(client: Client, ask: Ask) -> AsyncIterator[Any]:
        request = millrace_pb2.GenerateRequest(
            **{"model": TEXT_MODEL, "prompt": "Once", "request_id": ask.name, **fields}
        )
        return _responses(
            millrace_pb2_grpc.TextGenerationStub(client.channel()).Generate(request, timeout=ask.timeout_s)
        )

    return call


def _wrong_post(path: str, body: Any) -> Callable[[Client, Ask], AsyncIterator[Any]]:
    return lambda client, ask: client.post(ask, path, body)


async def _wrong_tensor(client: Client, ask: Ask) -> AsyncIterator[Any]:
    request = pb.ModelInferRequest(model_name=TEXT_MODEL, id=ask.name)
    add_input(request, Tensor("text_input", "FP32", np.zeros(1, np.float32)))
    yield await GRPCInferenceServiceStub(client.channel()).ModelInfer(request, timeout=ask.timeout_s)


_QUESTION = [{"role": "user", "content": "date: 3 Mar 2021"}]
_WRONG: Mapping[str, Callable[[Client, Ask], AsyncIterator[Any]]] = {
    "temperature": _wrong_generate(temperature=-1.0),
    "unknown model": _wrong_generate(model="nobody"),
    "too long": _wrong_generate(prompt="once " * 1500),
    "wrong endpoint": _wrong_post("/v1/chat/completions", {"model": DATE_MODEL, "messages": _QUESTION}),
    "tensor": _wrong_tensor,
    "not JSON": _wrong_post("/v1/completions", b"{"),
}
_WAYS: Mapping[str, Callable[[Client, Ask], AsyncGenerator[Piece, None]]] = {
    "Generate": _generate,
    "ModelStreamInfer": _model_stream_infer,
    "completions": _events("/v1/completions", lambda choice: choice["text"]),
    "chat completions": _events("/v1/chat/completions", lambda choice: choice["delta"].get("content")),
    "ModelInfer": _model_infer,
    "embeddings": _embeddings,
    "refused": _refused,
}
