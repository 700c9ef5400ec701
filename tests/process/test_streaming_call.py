"""A call of gRPC by StreamingCall with a server of grpc.aio, and with peers that break the protocol."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

import grpc
import pytest
from grpc import StatusCode
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, SettingsFrame

from headrace.rpc.http2 import streaming_call
from headrace.rpc.http2.streaming_call import CallBrokenError, StreamingCall
from headrace.rpc.server.server import SERVER_OPTIONS
from tests.waiting import until

HOST = "127.0.0.1"
MIB = 1024 * 1024


class Service(grpc.GenericRpcHandler):
    """`Echo` returns each message, `Fail` aborts with details, `Hold` does not read before `may_read` is set."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.ended = asyncio.Event()
        self.received: list[int] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = {"/test/Echo": self.echo, "/test/Fail": self.fail, "/test/Hold": self.hold}.get(details.method)
        return None if handler is None else grpc.stream_stream_rpc_method_handler(handler)

    async def echo(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield request
        finally:
            self.ended.set()

    async def fail(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b"before"
        await context.abort(StatusCode.RESOURCE_EXHAUSTED, "größer als 5 %")

    async def hold(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"waits"
        await self.may_read.wait()
        async for request in requests:
            self.received.append(len(request))
        yield b"never"


class Caller:
    """Opens calls and keeps their messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.drained = 0
        self.error: Exception | None = None

    def receive(self, message: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    def _drained(self) -> None:
        self.drained += 1

    @asynccontextmanager
    async def call(self, port: int, method: str) -> AsyncIterator[StreamingCall]:
        call = await StreamingCall.open(f"{HOST}:{port}", f"/test/{method}", self.receive, self._drained)
        try:
            await until(lambda: call.can_send or call.ended.done())
            yield call
        finally:
            call.close()


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service,))
    server.port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    yield server
    await server.stop(0)


@asynccontextmanager
async def peer(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """The port of a server that does not speak gRPC."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await answer(reader, writer)
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> None:
    """Answers a call with bytes that need not be a message."""
    http2 = H2Connection(H2Configuration(client_side=False))
    http2.initiate_connection()
    while data := await reader.read(65536):
        for event in http2.receive_data(data):
            if type(event).__name__ == "RequestReceived":
                http2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                http2.send_data(1, message)
        writer.write(http2.data_to_send())


async def send(call: StreamingCall, message: bytes) -> None:
    await until(lambda: call.can_send)
    call.send(message)


async def send_until_full(call: StreamingCall) -> int:
    """Sends until the peer, which does not read, takes no more; returns the number of messages."""
    sent = 0
    while call.can_send:
        call.send(b"x" * 100_000)
        sent += 1
        await asyncio.sleep(0)
        assert sent < 1000, "no window and no buffer ends"
    return sent


async def test_messages_of_every_size_are_received_whole_and_in_order(server: grpc.aio.Server, caller: Caller) -> None:
    messages = [
        bytes([number % 256]) * size for number, size in enumerate((0, 1, 5, 16_379, 16_384, 65_536, MIB, 20 * MIB, 3))
    ]
    async with caller.call(server.port, "Echo") as call:
        for message in messages:
            await send(call, message)
        await until(lambda: len(caller.messages) == len(messages), 30)
    assert caller.messages == messages


async def test_thousands_of_small_messages_pass_the_windows(server: grpc.aio.Server, caller: Caller) -> None:
    messages = [number.to_bytes(4, "big") * 1000 for number in range(5000)]  # 20 MB, more than any window.
    async with caller.call(server.port, "Echo") as call:
        for message in messages:
            await send(call, message)
        await until(lambda: len(caller.messages) == len(messages), 30)
    assert caller.messages == messages


async def test_the_status_and_its_details_come_after_the_messages(server: grpc.aio.Server, caller: Caller) -> None:
    async with caller.call(server.port, "Fail") as call:
        call.send(b"begin")
        assert await call.ended == (StatusCode.RESOURCE_EXHAUSTED, "größer als 5 %")
    assert caller.messages == [b"before"]


async def test_an_unknown_method_is_unimplemented(server: grpc.aio.Server, caller: Caller) -> None:
    async with caller.call(server.port, "Nothing") as call:
        code, _ = await call.ended
    assert code is StatusCode.UNIMPLEMENTED


async def test_a_call_continues_while_its_server_drains(server: grpc.aio.Server, caller: Caller) -> None:
    async with caller.call(server.port, "Echo") as call:
        await send(call, b"before")
        await until(lambda: caller.messages)
        stopping = asyncio.create_task(server.stop(30))
        with pytest.raises(CallBrokenError):  # The port is closed, so GOAWAY is sent.
            await until_refused(server.port, caller)
        await send(call, b"meanwhile")
        await until(lambda: caller.messages == [b"before", b"meanwhile"])
    await stopping


async def until_refused(port: int, caller: Caller) -> None:
    async with asyncio.timeout(10):
        while True:
            async with caller.call(port, "Echo") as call:
                if call.ended.done():
                    await call.ended


async def test_close_ends_the_call_at_the_server(server: grpc.aio.Server, service: Service, caller: Caller) -> None:
    async with caller.call(server.port, "Echo") as call:
        await send(call, b"runs")
        await until(lambda: caller.messages)
    async with asyncio.timeout(10):
        await service.ended.wait()
    assert call.ended.cancelled()


async def test_a_server_that_does_not_read_stops_the_sender_until_it_reads(
    server: grpc.aio.Server, service: Service, caller: Caller
) -> None:
    async with caller.call(server.port, "Hold") as call:
        await until(lambda: caller.messages)
        sent = await send_until_full(call)
        before = caller.drained
        service.may_read.set()
        await until(lambda: call.can_send and len(service.received) == sent)
        assert caller.drained > before


async def test_an_error_of_the_receiver_ends_the_call(server: grpc.aio.Server, caller: Caller) -> None:
    caller.error = ValueError("not a step")
    async with caller.call(server.port, "Echo") as call:
        await send(call, b"anything")
        with pytest.raises(ValueError, match="not a step"):
            await call.ended


async def test_without_a_server_no_call_begins(caller: Caller, server: grpc.aio.Server) -> None:
    await server.stop(0)
    with pytest.raises(CallBrokenError, match="no connection"):
        await StreamingCall.open(f"{HOST}:{server.port}", "/test/Echo", caller.receive, lambda: None)


async def test_the_connection_attempt_has_a_time_limit(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_call, "_CONNECT_S", 0.1)
    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):  # They fill its queue, so that Linux answers no further one.
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        port = listening.getsockname()[1]
        with pytest.raises(CallBrokenError, match="no connection"):
            await StreamingCall.open(f"{HOST}:{port}", "/test/Echo", caller.receive, lambda: None)


async def test_a_peer_that_does_not_speak_http2_breaks_the_call(caller: Caller) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with peer(answer) as port, caller.call(port, "Echo") as call:
        with pytest.raises(CallBrokenError, match="connection"):
            await call.ended


async def test_a_frame_out_of_place_breaks_the_call(caller: Caller) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SettingsFrame(0).serialize() + DataFrame(7, b"of no stream").serialize())
        await reader.read()

    async with peer(answer) as port, caller.call(port, "Echo") as call:
        with pytest.raises(CallBrokenError, match="HTTP/2"):
            await call.ended


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(struct.pack(">BL", 1, 3) + b"abc", "compressed", id="compressed"),
        pytest.param(struct.pack(">BL", 0, 65 * MIB), "bytes", id="too large"),
    ],
)
async def test_a_message_that_cannot_be_read_breaks_the_call(caller: Caller, message: bytes, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer, message)

    async with peer(answer) as port, caller.call(port, "Echo") as call:
        with pytest.raises(CallBrokenError, match=reason):
            await call.ended
    assert not caller.messages


async def test_pieces_of_a_message_are_put_together(caller: Caller) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packed = struct.pack(">BL", 0, 3) + b"abc" + struct.pack(">BL", 0, 2) + b"de"
        http2 = H2Connection(H2Configuration(client_side=False))
        http2.initiate_connection()
        while data := await reader.read(65536):
            for event in http2.receive_data(data):
                if type(event).__name__ == "RequestReceived":
                    http2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                    for at in range(len(packed)):
                        http2.send_data(1, packed[at : at + 1])
            writer.write(http2.data_to_send())

    async with peer(answer) as port, caller.call(port, "Echo"):
        await until(lambda: caller.messages == [b"abc", b"de"])
