"""Independent callers share connections: no call ends others on the same connection, to the gateway or
behind it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import psutil
import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.process.gateway_before_fakes import OPENAI, Gateway, running_gateway
from tests.waiting import until

SHORT = 3_000  # Envoy's own limits are 500 calls, 250 of them cancelled early, and 1,000 cancels at once.
AT_ONCE = 100


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("sharing")) as running:
        yield running


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
                inference_pb2.ServerMetadataRequest(), metadata=metadata, timeout=10
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
    ) -> Upload:
        ip, port = gateway.address.rsplit(":", 1)
        upload = cls(*await asyncio.open_connection(ip, int(port), local_addr=(address, 0)))
        lines = (f"POST {path} HTTP/1.1", f"host: {host}", *headers, "", "")
        upload._writer.write("\r\n".join(lines).encode())
        return upload

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(20):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[bytes, bytes]:
        """The head and the body, which must have a length."""
        head = await self.head()
        async with asyncio.timeout(20):
            (length,) = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
            return head, await self._reader.readexactly(int(length.split()[1]))

    async def leave(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


async def posted(gateway: Gateway, size: int) -> int:
    """The status of an honest body of a size; 0 where the connection broke."""
    with suppress(OSError):
        return (await gateway.request("POST", OPENAI, b"{}" + b" " * (size - 2))).status
    return 0


@pytest.mark.parametrize("headers", [(f"content-length: {LARGE}",), ("transfer-encoding: chunked",)])
async def test_bodies_that_are_only_announced_hold_nothing(gateway: Gateway, headers: tuple[str, ...]) -> None:
    uploads = [await Upload.begin(gateway, *headers, address="127.0.0.1") for _ in range(64)]
    for upload in uploads:
        await upload.send(b"1\r\n{\r\n" if "chunked" in headers[0] else b"{")
    assert [await posted(gateway, size) for size in (2, 40 << 10, 1 << 20, LARGE)] == [200] * 4
    for upload in uploads:
        await upload.leave()


@pytest.mark.parametrize("path", [OPENAI, "/v2/models/a/infer"])
async def test_a_caller_s_bodies_have_a_share_and_leave_room_for_those_of_others(gateway: Gateway, path: str) -> None:
    most, last = 8 << 20, 1 << 20
    uploads = [await Upload.begin(gateway, f"content-length: {LARGE}", path=path) for _ in range(4)]
    for upload in uploads:  # What is beyond 192 MiB is read and dropped.
        for _ in range((LARGE - last) // most):
            await upload.send(b" " * most)
    resident = psutil.Process(gateway.process.pid).memory_info().rss
    assert resident < 400 << 20
    for size in (2, 40 << 10, LARGE):
        assert await posted(gateway, size) == 200
    await uploads[-1].send(b" " * ((LARGE - last) % most + last))
    head, body = await uploads[-1].answer()
    assert head.startswith(b"HTTP/1.1 429")
    assert b"x-failed-hop: gateway" in head
    assert b"retry-after: 1" in head
    message = json.loads(body)["error"]
    assert "as many bytes of requests as it may" in (message["message"] if path == OPENAI else message)
    # Another one is refused before its first byte.
    early = await Upload.begin(gateway, f"content-length: {LARGE}", path=path)
    assert (await early.answer())[0].startswith(b"HTTP/1.1 429")
    for upload in (*uploads, early):
        await upload.leave()

    async def fits() -> bool:
        again = await Upload.begin(gateway, f"content-length: {LARGE}", path=path)
        try:
            async with asyncio.timeout(0.2):
                await again.answer()
                return False
        except TimeoutError:
            return True
        finally:
            await again.leave()

    await until(fits)


@pytest.mark.parametrize(
    ("path", "length", "host"),
    [
        (OPENAI, 4096, "gateway"),
        (OPENAI, None, "gateway"),
        ("/v2/models/a/infer", LARGE, "gateway"),
        ("/v2/models/a/infer", None, "predictor"),
    ],
)
async def test_a_body_that_comes_too_slowly_ends_and_a_long_one_that_goes_on_does_not(
    impatient: Gateway, path: str, length: int | None, host: str
) -> None:
    kind = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    slow, steady = [await Upload.begin(impatient, kind, path=path, host=host) for _ in range(2)]
    begun = asyncio.get_running_loop().time()
    piece, much = (b"1\r\n \r\n", b"400\r\n" + b" " * 1024 + b"\r\n") if length is None else (b" ", b" " * 500)

    async def drip() -> None:
        with suppress(ConnectionError):
            while True:
                await slow.send(piece)
                await asyncio.sleep(0.1)

    async def go_on() -> None:
        while asyncio.get_running_loop().time() < begun + 3.0:
            await steady.send(much)
            await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    head, body = await slow.answer()
    assert head.startswith(b"HTTP/1.1 408")
    assert b"x-failed-hop: gateway" in head
    assert b"too slowly" in body
    assert 1.0 < asyncio.get_running_loop().time() - begun < 10.0
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    await go_on()
    if length is None:
        await steady.send(b"0\r\n\r\n")
        assert not (await steady.head()).startswith(b"HTTP/1.1 408")
    for upload in (slow, steady):
        await upload.leave()
