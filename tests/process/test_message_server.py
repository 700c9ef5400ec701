"""Bidirectional calls of gRPC at MessageServer, by StreamingCall and by grpc.aio's client."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import StatusCode

from headrace.errors import RETRY_AFTER_MS, OverloadedError
from headrace.rpc.http2 import served_call
from headrace.rpc.http2.protocol import STREAM_WINDOW_BYTES
from headrace.rpc.http2.server import MessageServer
from headrace.rpc.http2.streaming_call import StreamingCall
from tests.process.test_streaming_call import send, send_until_full
from tests.support.http2_client import connected
from tests.waiting import until

HOST = "127.0.0.1"
MIB = 1024 * 1024
Write = Callable[[bytes], Awaitable[None]]


class Service:
    """`Echo` returns each message, `Fail` and `Break` end with errors, `Fill` writes without an end."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.written = 0
        self.ended: list[str] = []

    async def echo(self, messages: AsyncIterator[bytes], write: Write) -> None:
        try:
            async for message in messages:
                await self.may_read.wait()
                await write(message)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("whole")

    async def fail(self, messages: AsyncIterator[bytes], write: Write) -> None:
        await write(await anext(messages))
        raise OverloadedError("größer als 5 %", retry_after_ms=2000)

    async def break_(self, messages: AsyncIterator[bytes], write: Write) -> None:
        raise ZeroDivisionError("a secret")

    async def fill(self, messages: AsyncIterator[bytes], write: Write) -> None:
        while True:
            await write(b"x" * 1000)
            self.written += 1000


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[MessageServer]:
    methods = {"/t/Echo": service.echo, "/t/Fail": service.fail, "/t/Break": service.break_, "/t/Fill": service.fill}
    server = MessageServer("predictor", methods)
    await server.start(HOST, 0)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: MessageServer) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}", options=options) as channel:
        yield channel


@asynccontextmanager
async def streaming(server: MessageServer, method: str, received: list[bytes]) -> AsyncIterator[StreamingCall]:
    call = await StreamingCall.open(f"{HOST}:{server.port}", f"/t/{method}", received.append, lambda: None)
    try:
        await until(lambda: call.can_send or call.ended.done())
        yield call
    finally:
        call.close()


@pytest.mark.parametrize("client", ["own", "grpc.aio"])
async def test_messages_of_every_size_pass_whole_and_in_order(
    server: MessageServer, channel: grpc.aio.Channel, service: Service, client: str
) -> None:
    sizes = (0, 1, 5, 16_379, 16_384, STREAM_WINDOW_BYTES, MIB, 20 * MIB, 3)
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    received: list[bytes] = []
    if client == "own":
        async with streaming(server, "Echo", received) as call:
            for message in messages:
                await send(call, message)
            await until(lambda: len(received) == len(messages), 30)
        await until(lambda: service.ended == ["cancelled"])
    else:
        received += [message async for message in channel.stream_stream("/t/Echo")(iter(messages))]
        assert service.ended == ["whole"]
    assert received == messages


async def test_calls_share_a_connection(channel: grpc.aio.Channel) -> None:
    async def one(number: int) -> list[bytes]:
        messages = [number.to_bytes(4, "big") * size for size in (1, 1000, 100_000)]
        return [message[:4] async for message in channel.stream_stream("/t/Echo")(iter(messages))]

    answers = await asyncio.gather(*map(one, range(50)))
    assert answers == [[number.to_bytes(4, "big")] * 3 for number in range(50)]


async def test_an_error_becomes_the_status_after_the_messages(server: MessageServer, channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream("/t/Fail")(iter([b"before"]))
    assert await call.read() == b"before"
    assert await call.code() is StatusCode.RESOURCE_EXHAUSTED
    assert await call.details() == "größer als 5 %"
    trailing = dict(await call.trailing_metadata())
    assert trailing["x-failed-hop"] == "predictor"
    assert trailing[RETRY_AFTER_MS] == "2000"
    received: list[bytes] = []
    async with streaming(server, "Fail", received) as own:
        own.send(b"before")
        assert await own.ended == (StatusCode.RESOURCE_EXHAUSTED, "größer als 5 %")
    assert received == [b"before"]


async def test_an_unexpected_error_is_logged_and_not_told(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    call = channel.stream_stream("/t/Break")()
    assert (await call.code(), await call.details()) == (StatusCode.INTERNAL, "internal error")
    assert "a secret" in caplog.text


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream("/t/Nothing")()
    assert (await call.code(), await call.details()) == (StatusCode.UNIMPLEMENTED, "/t/Nothing is not implemented")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(struct.pack(">BL", 1, 3) + b"abc", "a message is compressed", id="compressed"),
        pytest.param(struct.pack(">BL", 0, 65 * MIB), f"a message has {65 * MIB} bytes", id="too large"),
        pytest.param(struct.pack(">BL", 0, 5) + b"abc", "the call ends within a message", id="cut short"),
    ],
)
async def test_a_message_that_cannot_be_read_ends_the_call(server: MessageServer, body: bytes, reason: str) -> None:
    async with connected(server.port) as client:
        stream = await (await client.request("/t/Echo", body)).wait()
    assert (stream.trailers["grpc-status"], stream.trailers["grpc-message"]) == ("3", reason)


async def test_a_caller_that_goes_away_ends_the_call(server: MessageServer, service: Service) -> None:
    received: list[bytes] = []
    async with streaming(server, "Echo", received) as call:
        await send(call, b"runs")
        await until(lambda: received)
    await until(lambda: service.ended == ["cancelled"])


async def test_a_caller_that_is_not_read_waits(server: MessageServer, service: Service) -> None:
    service.may_read.clear()
    received: list[bytes] = []
    async with streaming(server, "Echo", received) as call:
        sent = await send_until_full(call)
        service.may_read.set()
        await until(lambda: len(received) == sent)


async def test_a_caller_that_does_not_read_stops_the_writer(server: MessageServer, service: Service) -> None:
    window = 64 * 1024
    async with connected(server.port, window, reads=False) as client:
        stream = await client.request("/t/Fill", b"")
        await until(lambda: len(stream.data) == window)
        assert service.written <= window


async def test_a_fast_writer_lets_others_run(server: MessageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_call, "_AT_ONCE_BYTES", 4096)
    received: list[bytes] = []
    async with streaming(server, "Fill", []), streaming(server, "Echo", received) as call:
        await send(call, b"between")
        await until(lambda: received == [b"between"])


async def test_calls_have_the_grace_of_a_stop(server: MessageServer, service: Service) -> None:
    received: list[bytes] = []
    async with streaming(server, "Echo", received) as call, streaming(server, "Echo", []) as other:
        await send(call, b"before")
        await until(lambda: received)
        stopping = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0)
        await send(call, b"meanwhile")
        await until(lambda: received == [b"before", b"meanwhile"])
        await server.stop(0)
        assert await call.ended == (StatusCode.UNAVAILABLE, "the service stops")
        assert (await other.ended)[0] is StatusCode.UNAVAILABLE
        await stopping
    assert service.ended == ["cancelled"] * 2
