"""Streams, bodies and connections that callers share: slow and leaving ones end no call but their own."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import psutil
import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.process.gateway_before_fakes import OPENAI, Gateway, running_gateway
from tests.support.http2_client import connected
from tests.waiting import HANG_S, until

MIB = 1 << 20
LEAVING = 1000
AT_ONCE = 50


def begin(gateway: Gateway, **fields: int | bool) -> socket.socket:
    """A request whose answer is not read yet, by a client with small buffers."""
    host, _, port = gateway.address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    client.settimeout(HANG_S)
    client.connect((host, int(port)))
    body = json.dumps(fields).encode()
    head = f"POST {OPENAI} HTTP/1.1\r\nhost: {gateway.address}\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


async def test_a_slow_reader_stops_only_its_own_stream_and_one_that_leaves_ends_it(gateway: Gateway) -> None:
    openai = gateway.openai
    before = openai.written
    client = await asyncio.to_thread(begin, gateway, pieces=1_000_000, size=1000)
    await until(lambda: openai.running, holds=(1).__eq__)
    written = -1

    async def stands() -> bool:
        nonlocal written
        last, written = written, openai.written
        await asyncio.sleep(0.3)
        return last == written == openai.written

    await until(stands)
    assert written - before < 8 * MIB, "buffers of the gateway and the kernel, and no more"
    assert (await gateway.post(pieces=10, size=1000)).body == b"x" * 10_000
    client.close()
    await until(lambda: openai.running == 0)


async def test_callers_that_leave_end_no_other_stream_of_the_connection(gateway: Gateway) -> None:
    gateway.openai.first_chunk_was_read.clear()
    others = [await asyncio.to_thread(begin, gateway, stream=True) for _ in range(8)]
    turns = asyncio.Semaphore(AT_ONCE)

    async def leave(number: int) -> None:
        async with turns:
            client = await asyncio.to_thread(begin, gateway, pieces=1_000_000, size=1000)
            await asyncio.sleep(0.005 * (number % 4))
            client.close()

    await asyncio.gather(*(leave(number) for number in range(LEAVING)))
    await until(lambda: gateway.openai.running == 0)
    gateway.openai.first_chunk_was_read.set()

    def rest(client: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"0\r\n\r\n") and (data := client.recv(65536)):
            received += data
        client.close()
        return received

    for client in others:
        assert b"data: [DONE]" in await asyncio.to_thread(rest, client)


async def test_the_inner_path_of_a_method_is_an_unknown_path(gateway: Gateway) -> None:
    answer = await gateway.request("POST", "/headrace.rest.v1.OpenAI/Completions", b"{}")
    assert (answer.status, answer.headers["x-failed-hop"]) == (404, "gateway")


async def test_a_slow_body_reaches_the_service_when_it_is_complete(gateway: Gateway) -> None:
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"pieces": 1, "size": 3, "padding": "x" * 100_000}).encode()
    writer.write(f"POST {OPENAI} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    await writer.drain()
    assert (await gateway.post(pieces=1, size=1)).body == b"x"  # The first body has arrived by now, except its end.
    assert gateway.openai.running == 0
    written = gateway.openai.written
    writer.write(body[-1:])
    assert b"200 OK" in await reader.readline()
    assert gateway.openai.written == written + 3
    writer.close()


async def test_a_body_beyond_60_mib_is_refused_by_the_gateway_and_one_of_60_is_not(gateway: Gateway) -> None:
    body = json.dumps({"pieces": 1, "size": 1}).encode()
    answer = await gateway.request("POST", OPENAI, body.ljust(60 * MIB))
    assert (answer.status, answer.body) == (200, b"x")
    answer = await gateway.request("POST", OPENAI, body.ljust(60 * MIB + 1))
    assert (answer.status, answer.headers["x-failed-hop"]) == (413, "gateway")
    assert answer.json["error"]["message"] == "the body is larger than 60 MiB"


async def exchange(gateway: Gateway, *requests: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The status lines and headers of answers to requests on one connection; those to HEAD have no body."""
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        async with asyncio.timeout(HANG_S):
            for request in requests:
                writer.write(request)
                status, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                headers = dict(line.lower().split(b": ", 1) for line in lines if line)
                answers.append((status, headers))
                if request.startswith(b"HEAD"):
                    continue
                if headers.get(b"transfer-encoding") == b"chunked":
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await reader.readexactly(int(headers[b"content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()
    return answers


@pytest.mark.parametrize("path", ["/", "/playground/main.js", "/v2/health/ready", "/v1/models", "/health", "/nothing"])
async def test_head_has_the_status_of_get_and_no_body(gateway: Gateway, path: str) -> None:
    requests = [f"{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode() for method in ("GET", "HEAD", "HEAD", "GET")]
    answers = await exchange(gateway, *requests)
    assert len({status for status, _ in answers}) == 1
    assert {headers.get(b"x-failed-hop") for _, headers in answers} == {answers[0][1].get(b"x-failed-hop")}


async def test_a_rest_client_gets_no_trailers_of_grpc_and_its_own_headers_of_it_go_no_further(gateway: Gateway) -> None:
    sent = (("content-type", "application/json"), ("grpc-timeout", "1n"), ("grpc-encoding", "gzip"))
    async with connected(int(gateway.address.rpartition(":")[2])) as client:
        stream = await client.post("/v2/models/a/generate_stream", b"{}", sent)
        whole = await client.post("/v2/models/a/infer", b"{}", sent)
    for answer in (stream, whole):
        assert (answer.status, answer.is_ended, answer.reset_with) == (200, True, None)
        assert not [name for name in (*answer.headers, *answer.trailers) if name.startswith("grpc")]


async def test_http_1_0_is_answered_and_closes_unless_asked_to_stay(gateway: Gateway) -> None:
    page = b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    assert [status for status, _ in await exchange(gateway, page, page)] == [b"HTTP/1.0 200 OK"] * 2
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stream = json.dumps({"pieces": 3, "size": 10}).encode()
    writer.write(b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (OPENAI.encode(), len(stream), stream))
    async with asyncio.timeout(HANG_S):
        head, _, received = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert (head.split(b"\r\n")[0], received) == (b"HTTP/1.0 200 OK", b"x" * 30)


@pytest.mark.parametrize(
    "path",
    ["/v1/completions/", "//v1//completions", "/openai/v1/completions/", "/v1/completions/?a=b", "/v1/./completions"],
)
async def test_slashes_that_say_nothing_do_not_matter(gateway: Gateway, path: str) -> None:
    answer = await gateway.request("POST", path, json.dumps({"answer": {"is": "whole"}}).encode() + b" " * MIB)
    assert (answer.status, answer.json) == (200, {"is": "whole"})
    assert (await gateway.request("GET", "//v2/health/ready/")).json["error"] == 'model "a" is loading'
    assert (await gateway.request("GET", "//")).status == 200


SHORT = 3_000  # Envoy's own limits are 500 calls, 250 of them cancelled early, and 1,000 cancels at once.
AT_ONCE = 100


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    environment = {"REST_BODIES_GRACE_S": "1"}
    async with running_gateway(tmp_path_factory.mktemp("impatient"), environment=environment) as running:
        yield running


class HonestStream:
    """A stream that sends requests and reads answers, again and again, until `end`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.answers = 0
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(inference_pb2_grpc.GRPCInferenceServiceStub(channel)))

    async def _run(self, stub: inference_pb2_grpc.GRPCInferenceServiceStub) -> None:
        async for _ in stub.ModelStreamInfer(self._requests()):
            self.answers += 1

    async def _requests(self) -> AsyncIterator[inference_pb2.ModelInferRequest]:
        while not self._end.is_set():
            yield inference_pb2.ModelInferRequest(id="honest")
            await asyncio.sleep(0.02)

    async def goes_on(self) -> None:
        before = self.answers
        await until(lambda: self.answers > before or self._task.done())

    async def end(self) -> None:
        """Ends the stream; raises its error if it ended before."""
        self._end.set()
        await self._task


async def leave(channel: grpc.aio.Channel, number: int, ends: Counter[grpc.StatusCode | None]) -> None:
    """A call that is cancelled at once or after a moment, or whose deadline passes."""
    timeout = 0.005 * (number % 4) if number % 2 else None
    call = headrace_pb2_grpc.TextGenerationStub(channel).Generate(headrace_pb2.GenerateRequest(), timeout=timeout)
    if timeout is None:
        await asyncio.sleep(0.005 * (number % 4))
        call.cancel()
    ends[await call.code()] += 1


async def test_thousands_of_cancels_and_short_deadlines_end_no_other_call(gateway: Gateway) -> None:
    ends: Counter[grpc.StatusCode | None] = Counter()
    turns = asyncio.Semaphore(AT_ONCE)
    async with gateway.channel() as shared, gateway.channel("elsewhere") as other:

        async def one(number: int) -> None:
            async with turns:
                await leave(shared, number, ends)

        # Calls on the other connection share the connections from the gateway to the service.
        streams = [HonestStream(channel) for channel in (shared, shared, shared, other, other)]
        await asyncio.gather(*(one(number) for number in range(SHORT)))
        for stream in streams:
            await stream.goes_on()
            await stream.end()
    assert set(ends) == {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_headers_too_large_for_the_codec_end_only_their_own_call(gateway: Gateway) -> None:
    async with gateway.channel() as shared:
        stream = HonestStream(shared)
        for count, size in ((1, 20_000), (1, 62_000), (10, 10_000), (300, 1)):
            metadata = tuple((f"x-{number}", "a" * size) for number in range(count))
            call = inference_pb2_grpc.GRPCInferenceServiceStub(shared).ServerMetadata(
                inference_pb2.ServerMetadataRequest(), metadata=metadata, timeout=HANG_S
            )
            assert await call.code() is not grpc.StatusCode.OK
        await stream.goes_on()
        await stream.end()


LARGE = 60 << 20  # The largest body of a REST request; a worker of Envoy holds six of them, and three of one caller.


class Upload:
    """A REST request whose last byte is not sent until `finish`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def begin(
        cls, gateway: Gateway, *headers: str, path: str = OPENAI, address: str = "127.0.0.2", host: str = "gateway"
    ) -> "Upload":
        ip, port = gateway.address.rsplit(":", 1)
        upload = cls(*await asyncio.open_connection(ip, int(port), local_addr=(address, 0)))
        lines = (f"POST {path} HTTP/1.1", f"host: {host}", *headers, "", "")
        upload._writer.write("\r\n".join(lines).encode())
        return upload

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[bytes, bytes]:
        """The head and the body, which must have a length."""
        head = await self.head()
        (length,) = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        async with asyncio.timeout(HANG_S):
            return head, await self._reader.readexactly(int(length.split()[1]))

    async def leave(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def uploading(gateway: Gateway, count: int, *headers: str, **where: str) -> AsyncIterator[list[Upload]]:
    """So many uploads, which leave with the block."""
    uploads = [await Upload.begin(gateway, *headers, **where) for _ in range(count)]
    try:
        yield uploads
    finally:
        for upload in uploads:
            await upload.leave()


async def posted(gateway: Gateway, size: int) -> int:
    """The status of an honest body of a size; 0 where the connection broke."""
    with suppress(OSError):
        return (await gateway.request("POST", OPENAI, b"{}" + b" " * (size - 2))).status
    return 0


@pytest.mark.parametrize("headers", [(f"content-length: {LARGE}",), ("transfer-encoding: chunked",)])
async def test_bodies_that_are_only_announced_hold_nothing(gateway: Gateway, headers: tuple[str, ...]) -> None:
    async with uploading(gateway, 64, *headers, address="127.0.0.1") as uploads:
        for upload in uploads:
            await upload.send(b"1\r\n{\r\n" if "chunked" in headers[0] else b"{")
        assert [await posted(gateway, size) for size in (2, 40 << 10, 1 << 20, LARGE)] == [200] * 4


@pytest.mark.parametrize("path", [OPENAI, "/v2/models/a/infer"])
async def test_a_caller_s_bodies_have_a_share_and_leave_room_for_those_of_others(gateway: Gateway, path: str) -> None:
    one, last = b"{}".ljust(LARGE), LARGE - MIB
    length = f"content-length: {LARGE}"
    async with uploading(gateway, 4, length, path=path) as uploads:
        for upload in uploads:  # What is beyond 192 MiB is read and dropped.
            await upload.send(one[:last])
        assert psutil.Process(gateway.process.pid).memory_info().rss < 400 * MIB
        for size in (2, 40 << 10, LARGE):
            assert await posted(gateway, size) == 200
        await uploads[-1].send(one[last:])
        head, body = await uploads[-1].answer()
        assert head.startswith(b"HTTP/1.1 429")
        assert b"x-failed-hop: gateway" in head
        assert b"retry-after: 1" in head
        message = json.loads(body)["error"]
        assert "as many bytes of requests as it may" in (message["message"] if path == OPENAI else message)
        async with uploading(gateway, 1, length, path=path) as [early]:  # Another one is refused before its first byte.
            assert (await early.answer())[0].startswith(b"HTTP/1.1 429")

    async def fits() -> bool:
        async with uploading(gateway, 1, length, path=path) as [again]:
            with suppress(ConnectionError):  # Refused while it is sent.
                await again.send(one)
                return (await again.head()).startswith(b"HTTP/1.1 200")
        return False

    await until(fits)


@pytest.mark.parametrize(
    ("path", "length", "host"),
    [
        (OPENAI, 4096, "gateway"),
        pytest.param(OPENAI, None, "gateway", marks=pytest.mark.full),
        pytest.param("/v2/models/a/infer", LARGE, "gateway", marks=pytest.mark.full),
        ("/v2/models/a/infer", None, "predictor"),
    ],
)
async def test_a_body_that_comes_too_slowly_ends_and_a_long_one_that_goes_on_does_not(
    impatient: Gateway, path: str, length: int | None, host: str
) -> None:
    kind = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    clock = asyncio.get_running_loop().time

    def piece(size: int) -> bytes:
        return b" " * size if length else b"%x\r\n%b\r\n" % (size, b" " * size)

    async def drip(upload: Upload) -> None:
        with suppress(ConnectionError):
            while True:
                await upload.send(piece(1))
                await asyncio.sleep(0.1)

    async with uploading(impatient, 1, kind, path=path, host=host) as [slow]:
        begun, dripping = clock(), asyncio.create_task(drip(slow))
        head, body = await slow.answer()
        dripping.cancel()
    assert clock() - begun > 1.0
    assert head.startswith(b"HTTP/1.1 408")
    assert b"x-failed-hop: gateway" in head
    assert b"too slowly" in body
    async with uploading(impatient, 1, kind, path=path, host=host) as [steady]:
        begun, sent = clock(), 0
        while (passed_s := clock() - begun) < 3.0:
            more = int(1000 * passed_s) + 500 - sent  # A thousand bytes a second, also where this process waits.
            await steady.send(piece(more))
            sent += more
            await asyncio.sleep(0.5)
        if length is None:
            await steady.send(b"0\r\n\r\n")
            assert not (await steady.head()).startswith(b"HTTP/1.1 408")
