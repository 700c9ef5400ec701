"""Calls through the gateway, as a client without Headrace's code makes them; of the payload log and of health too."""

import asyncio
import http.client
import json
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_runner.settings import ROOT
from tests.waiting import until

STREAMS = 64
PACE = 20  # Tokens of a stream in a second, so that it lasts as long on every machine.
TIMEOUT_S = 60
_TRAILERS = 0x80
_FRAME_HEAD = 5  # The head of a gRPC-Web frame: a byte of flags and four of the length.


def channel(gateway: str, authority: str | None = None, max_bytes: int = 4 << 20) -> grpc.aio.Channel:
    """A separate connection; `max_bytes` bounds an answer, by default as gRPC does."""
    options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", max_bytes),
    ]
    if authority is not None:
        options.append(("grpc.default_authority", authority))
    return grpc.aio.insecure_channel(gateway, options=options)


async def generate(gateway: str, **fields: Any) -> list[headrace_pb2.GenerateResponse]:
    """All responses of one `Generate`."""
    async with channel(gateway) as open_channel:
        stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
        return [response async for response in stub.Generate(headrace_pb2.GenerateRequest(**fields))]


async def begun_streams(
    open_channel: grpc.aio.Channel,
    ids: Iterable[str] = ("",) * STREAMS,
    metadata: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> list[asyncio.Task[int]]:
    """Paced calls of `Generate`, one for each request id, that have received a token.

    `fields` are those of the requests. The tasks return the number of tokens.
    """
    started = asyncio.Semaphore(0)
    stub = headrace_pb2_grpc.TextGenerationStub(open_channel)

    async def stream(request_id: str) -> int:
        request = headrace_pb2.GenerateRequest(request_id=request_id, ignore_eos=True, pace=PACE, **fields)
        received = 0
        async for response in stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S):
            if received == 0:
                started.release()
            received += len(response.token_ids)
        return received

    streams = [asyncio.create_task(stream(request_id)) for request_id in ids]
    for _ in streams:
        await asyncio.wait_for(started.acquire(), TIMEOUT_S)
    return streams


def text_of(responses: list[headrace_pb2.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def text_request(model: str, prompt: str, **parameters: int) -> inference_pb2.ModelInferRequest:
    """An OIP request to a text model."""
    return ids_request(model, bytes_tensor("text_input", [prompt.encode()]), **parameters)


def ids_request(model: str, tensor: Tensor, **parameters: int) -> inference_pb2.ModelInferRequest:
    """An OIP request to a predictor."""
    request = inference_pb2.ModelInferRequest(model_name=model, id="r")
    add_input(request, tensor)
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


async def infer(gateway: str, request: inference_pb2.ModelInferRequest, authority: str | None = None) -> Any:
    """The outputs of one `ModelInfer`, by name."""
    async with channel(gateway, authority) as open_channel:
        return decode_outputs(await GRPCInferenceServiceStub(open_channel).ModelInfer(request))


async def statistics(address: str, model: str) -> inference_pb2.ModelStatistics:
    """A predictor's statistics of a model."""
    async with channel(address) as open_channel:
        request = inference_pb2.ModelStatisticsRequest(name=model)
        return (await GRPCInferenceServiceStub(open_channel).ModelStatistics(request)).model_stats[0]


async def each(item: Any) -> AsyncIterator[Any]:
    yield item


class Answer:
    """One HTTP answer: status, headers, body, and the time of each piece (seconds since the request)."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Data of the server-sent events."""
        return [line.removeprefix("data: ") for line in self._lines if not line.startswith(":")]

    @property
    def comments(self) -> list[str]:
        """The comments of the stream of events."""
        return [line for line in self._lines if line.startswith(":")]

    @property
    def _lines(self) -> list[str]:
        return [line for line in self.body.decode().split("\n\n") if line]


def http_request(
    gateway: str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    on_piece: Callable[[], None] | None = None,
    on_connection: Callable[[http.client.HTTPConnection], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """A request over HTTP/1.1; blocks; `body` is sent as JSON unless it is bytes.

    `on_piece` is called for each piece, `on_connection` with the connection, which another thread may break.
    """
    host, _, port = gateway.rpartition(":")
    connection = (
        http.client.HTTPConnection(host, int(port), timeout=60)
        if tls is None
        else http.client.HTTPSConnection(host, int(port), timeout=60, context=tls)
    )
    if on_connection is not None:
        on_connection(connection)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    answer, begun = Answer(), time.monotonic()
    try:
        # The answer to a too large body comes before the whole body has been read.
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        while piece := response.read1(65536):
            answer.pieces.append((time.monotonic() - begun, piece))
            if on_piece is not None:
                on_piece()
    finally:
        connection.close()
    return answer


def leave_http(gateway: str, path: str, body: Any) -> None:
    """Posts a request for a stream over HTTP/1.1 and disconnects after its first bytes; blocks."""
    host, _, port = gateway.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read1(64)
    response.close()
    connection.close()


async def rest(gateway: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """`http_request` in a thread; underscores in header names become dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await asyncio.to_thread(http_request, gateway, method, path, body, named)


async def post(stack: Any, path: str, body: Any, **headers: str) -> Answer:
    """A request over REST that must succeed."""
    answer = await rest(stack.gateway, "POST", path, body, **headers)
    assert answer.status == 200, answer.body
    return answer


def web_frames(body: bytes) -> tuple[list[bytes], dict[str, str]]:
    """Messages and trailers of a gRPC-Web body, which may be unfinished."""
    messages, trailers, at = [], {}, 0
    while at + _FRAME_HEAD <= len(body):
        length = int.from_bytes(body[at + 1 : at + _FRAME_HEAD], "big")
        if at + _FRAME_HEAD + length > len(body):
            break
        contents = body[at + _FRAME_HEAD : at + _FRAME_HEAD + length]
        if body[at] & _TRAILERS:
            lines = contents.decode(errors="replace").splitlines()
            trailers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
        else:
            messages.append(contents)
        at += _FRAME_HEAD + length
    return messages, trailers


async def query(gateway: str, **filters: Any) -> list[headrace_pb2.PayloadRecord]:
    """The records that pass the filters now."""
    async with channel(gateway) as open_channel:
        found = headrace_pb2_grpc.PayloadLogStub(open_channel).Query(
            headrace_pb2.QueryPayloadsRequest(**filters), timeout=10
        )
        return [record async for record in found]


async def records(gateway: str, count: int = 1, **filters: Any) -> list[headrace_pb2.PayloadRecord]:
    """The services' records that pass the filters, once there are that many, without the gateway's own records."""

    async def services() -> list[headrace_pb2.PayloadRecord]:
        return [record for record in await query(gateway, **filters) if record.model]

    return list(await until(services, holds=lambda found: len(found) >= count))


async def hop_of(gateway: str, model: str) -> str:
    """The service that answers for the model: the hop of the error for an id that is too long."""
    async with channel(gateway) as open_channel:
        try:
            await GRPCInferenceServiceStub(open_channel).ModelInfer(
                inference_pb2.ModelInferRequest(model_name=model, id="7" * 10_000), timeout=20
            )
        except grpc.aio.AioRpcError as error:
            return str(dict(error.trailing_metadata() or ()).get("x-failed-hop", ""))
    raise AssertionError(f"{model} takes any id")


async def until_direct(gateway: str, model: str) -> None:
    await until(lambda: hop_of(gateway, model), holds="predictor".__eq__)


async def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command `headrace`, which ends by itself."""
    program = (sys.executable, "-m", "headrace_runner.command", *arguments)
    return await asyncio.to_thread(subprocess.run, program, cwd=ROOT, capture_output=True, text=True)


async def serves(address: str, name: str = "", within_s: float = 1.0) -> bool:
    """Whether the service at `address` (host:port) answers SERVING."""
    async with channel(address) as open_channel:
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=within_s)
        except grpc.aio.AioRpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
