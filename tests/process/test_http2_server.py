"""The HTTP/2 server: calls as gRPC has them, and a peer that misbehaves harms nobody but itself."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from google.api.httpbody_pb2 import HttpBody
from h2.errors import ErrorCodes

from millrace.errors import OverloadedError, StartupError
from millrace.rpc.admission import Admission, head_of_call
from millrace.rpc.byte_budget import ByteBudget
from millrace.rpc.handlers import CallInterceptor
from millrace.rpc.http2 import connection as http2_connection
from millrace.rpc.http2 import request as http2_request
from millrace.rpc.http2.methods import HttpMethod
from millrace.rpc.http2.protocol import STREAM_WINDOW_BYTES
from millrace.rpc.http2.server import HttpServer
from millrace.rpc.listeners import reserved
from services.transformer.frontends.openai.http_methods import error_body
from tests.support.http2_client import connected
from tests.waiting import until

HOST = "127.0.0.1"
EVENTS = "text/event-stream"
ECHO, COUNT, FAIL, HANG, NAME = (f"/test.Service/{name}" for name in ("Echo", "Count", "Fail", "Hang", "Name"))
KIB = 1024


class Service:
    """`written` counts what Count has written, `ended` the calls that hung and have ended."""

    def __init__(self) -> None:
        self.written = self.hanging = self.ended = 0

    async def echo(self, request: bytes, context: Any) -> AsyncIterator[HttpBody]:
        head_of_call().add(("x-test", "head"))
        yield HttpBody(content_type="application/octet-stream", data=request)

    async def count(self, request: bytes, context: Any) -> AsyncIterator[HttpBody]:
        """So many pieces of so many bytes."""
        asked = json.loads(request)
        for _ in range(asked["pieces"]):
            yield HttpBody(content_type=EVENTS, data=b"x" * asked["size"])
            self.written += asked["size"]

    async def fail(self, request: bytes, context: Any) -> AsyncIterator[HttpBody]:
        if request:
            yield HttpBody(content_type=EVENTS, data=request)
        raise OverloadedError("full", retry_after_ms=20)

    async def hang(self, request: bytes, context: Any) -> AsyncIterator[HttpBody]:
        self.hanging += 1
        try:
            if request:
                yield HttpBody(content_type=EVENTS, data=request)
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    async def name(self, request: str, context: Any) -> AsyncIterator[HttpBody]:
        yield HttpBody(content_type="text/plain", data=request.encode())

    def methods(self) -> list[HttpMethod]:
        posted = {ECHO: self.echo, COUNT: self.count, FAIL: self.fail, HANG: self.hang}
        return [
            *(HttpMethod(path[1:], behaviour, bytes) for path, behaviour in posted.items()),
            HttpMethod(NAME[1:], self.name, bytes.decode, takes_body=False, parameter="model"),
        ]


class Served:
    def __init__(self, admission: Admission | None = None, shares_port: bool = False) -> None:
        self.service = Service()
        self.server = HttpServer(CallInterceptor("transformer", admission), error_body, shares_port)
        self.server.add(*self.service.methods())
        self.port = 0

    async def start(self, port: int = 0) -> Served:
        self.port = await self.server.start(HOST, port)
        return self


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await Served().start()
    yield served
    await served.server.stop(0)


# ------------------------------------------------------------------ calls


async def test_a_body_comes_back_with_the_head_of_its_answer(served: Served) -> None:
    body = random.randbytes(300 * KIB)
    async with connected(served.port) as client:
        stream = await client.request(ECHO, end=False)
        for at in range(0, len(body), 16 * KIB):
            await stream.send(body[at : at + 16 * KIB], at + 16 * KIB >= len(body))
            await until(lambda: client.http2.local_flow_control_window(stream.number) > 16 * KIB)
        await stream.wait()
    assert (stream.status, stream.data) == (200, body)
    assert stream.headers["content-type"] == "application/octet-stream"
    assert stream.headers["x-test"] == "head"


@pytest.mark.parametrize(
    ("path", "named"), [("/a%20b%2Fc", "a b/c"), ("?model=d+e&x=1", "d e"), ("/one?model=two", "one"), ("", "")]
)
async def test_a_method_without_a_body_gets_what_its_path_or_its_query_names(
    served: Served, path: str, named: str
) -> None:
    async with connected(served.port) as client:
        stream = await (await client.request(NAME + path, verb="GET")).wait()
    assert (stream.status, stream.data.decode()) == (200, named)


@pytest.mark.parametrize(("verb", "path"), [("GET", ECHO), ("POST", NAME), ("POST", "/x"), ("POST", f"{ECHO}/x")])
async def test_another_path_or_method_is_not_found(served: Served, verb: str, path: str) -> None:
    async with connected(served.port) as client:
        stream = await (await client.request(path, verb=verb)).wait()
    assert stream.status == 404
    assert json.loads(stream.data)["error"]["message"] == "unknown path or method"


async def test_an_error_before_the_first_byte_is_the_answer_and_one_after_it_in_the_trailers(served: Served) -> None:
    async with connected(served.port) as client:
        first = await (await client.request(FAIL)).wait()
        later = await (await client.request(FAIL, b"begun")).wait()
    assert first.status == 429
    assert json.loads(first.data)["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "code": "rate_limit_exceeded",
        "param": None,
    }
    assert (first.headers["x-failed-hop"], first.headers["retry-after-ms"]) == ("transformer", "20")
    assert "x-http-status" not in first.headers
    assert (later.status, later.data, later.reset_with) == (200, b"begun", None)
    assert (later.trailers["grpc-status"], later.trailers["x-failed-hop"]) == ("8", "transformer")


async def test_64_streams_of_one_connection_are_kept_apart(served: Served) -> None:
    async with connected(served.port) as client:
        streams = [await client.request(ECHO, str(number).encode() * 1000) for number in range(64)]
        for number, stream in enumerate(streams):
            await stream.wait()
            assert stream.data == str(number).encode() * 1000


async def test_a_deadline_ends_a_call_with_its_status(served: Served) -> None:
    timeout = [("grpc-timeout", "100m")]
    async with connected(served.port) as client:
        silent, begun = [await client.request(HANG, body, timeout) for body in (b"", b"begun")]
        await silent.wait()
        await begun.wait()
    assert (silent.status, json.loads(silent.data)["error"]["code"]) == (504, "deadline_exceeded")
    assert (begun.status, begun.trailers["x-http-status"]) == (200, "504")
    assert served.service.ended == 2


async def test_a_reset_or_a_lost_connection_cancels_the_call_at_once(served: Served) -> None:
    service = served.service
    async with connected(served.port) as client:
        streams = [await client.request(HANG, b"begun") for _ in range(3)]
        await until(lambda: service.hanging == 3)
        await streams[0].reset()
        await until(lambda: service.ended == 1)
        assert (await (await client.request(ECHO, b"others go on")).wait()).data == b"others go on"
        unread = await client.request(ECHO, b"a body without an end", end=False)
        await unread.reset()
    await until(lambda: service.ended == 3)


async def test_a_body_without_an_end_is_cancelled_with_its_stream(served: Served) -> None:
    async with connected(served.port) as client:
        stream = await client.request(ECHO, b"x" * KIB, end=False)
        await stream.reset()
        assert (await (await client.request(ECHO, b"next")).wait()).data == b"next"


# ------------------------------------------------------------------ bounds


async def test_a_slow_reader_stops_its_own_call_alone(served: Served) -> None:
    window = 32 * KIB
    asked = json.dumps({"pieces": 2000, "size": 500}).encode()
    async with connected(served.port, window, reads=False) as client:
        slow = await client.request(COUNT, asked)
        await until(lambda: len(slow.data) == window)
        assert served.service.written <= window, "nothing is made for a reader that does not read"
        assert (await (await client.request(ECHO, b"others go on")).wait()).data == b"others go on"
        while not slow.is_ended:
            await slow.read_on()
            before = len(slow.data)
            await slow.wait(lambda before=before: len(slow.data) > before)
    assert len(slow.data) == 1_000_000


async def test_a_body_that_is_too_large_is_refused_as_soon_as_it_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_request, "MAX_MESSAGE_BYTES", 64 * KIB)
    async with connected(served.port) as client:
        stream = await client.request(ECHO, end=False)
        for _ in range(5):
            await stream.send(b"x" * 16 * KIB)
        await stream.wait()
        assert (stream.status, json.loads(stream.data)["error"]["code"]) == (413, "resource_exhausted")
        assert stream.reset_with in (None, ErrorCodes.NO_ERROR)
        assert (await (await client.request(ECHO, b"others go on")).wait()).data == b"others go on"


async def test_admission_refuses_what_it_refuses_of_grpc() -> None:
    served = await Served(Admission(max_calls=2, budget=ByteBudget(400 * KIB))).start()
    async with connected(served.port) as client:
        large = await (await client.request(ECHO, b"x" * 16_000)).wait()
        assert large.status == 200
        stream = await client.request(ECHO, end=False)
        for at in range(20):
            await stream.send(b"x" * 10_000, at == 19)
        assert (await stream.wait()).status == 413, "with its copies it never fits"
        for _ in range(2):
            await client.request(HANG, b"begun")
        refused = await (await client.request(ECHO, b"one more")).wait()
        assert (refused.status, refused.headers["retry-after-ms"]) == (429, "1000")
    await served.server.stop(0)


async def test_before_a_call_reads_no_more_comes_than_a_window(served: Served) -> None:
    """A call that waits in a handler that takes no body yet, here one by GET."""
    async with connected(served.port) as client:
        stream = await client.request(f"{NAME}/x", verb="GET", end=False)
        await stream.wait()
        assert (stream.status, stream.data) == (200, b"x")
        assert client.http2.local_flow_control_window(stream.number) <= STREAM_WINDOW_BYTES


async def test_bodies_that_never_end_take_no_more_memory_than_they_may() -> None:
    most = 32 * KIB * KIB
    served = await Served(Admission(max_unfinished=most)).start()
    async with AsyncExitStack() as opened:
        streams = []
        for _ in range(12):
            client = await opened.enter_async_context(connected(served.port))
            streams.append(await client.request(ECHO, end=False))
        sending = [asyncio.create_task(stream.send_all(b"x" * 8 * KIB * KIB + b"y", end=False)) for stream in streams]
        await until(lambda: sum(stream.is_ended for stream in streams) >= 4, timeout_s=30)
        ended = [stream for stream in streams if stream.is_ended]
        assert {(stream.status, stream.headers["retry-after-ms"]) for stream in ended} == {(429, "1000")}
        assert len(ended) < len(streams), "those that began first stay"
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await served.server.stop(0)


@pytest.mark.parametrize("kind", ["pings", "settings"])
async def test_a_flood_of_frames_that_want_an_answer_waits_in_no_queue(served: Served, kind: str) -> None:
    frame = {"pings": b"\0\0\x08\6\0\0\0\0\0" + b"x" * 8, "settings": b"\0\0\0\4\0\0\0\0\0"}[kind]
    reader, writer = await asyncio.open_connection(HOST, served.port, limit=KIB)  # Which is not read.
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    sent = 0
    with suppress(TimeoutError):
        while sent < 256 * KIB * KIB:
            writer.write(frame * 10_000)
            sent += 10_000 * len(frame)
            async with asyncio.timeout(2):
                await writer.drain()
    assert sent < 64 * KIB * KIB, "the server reads no more than its answers are read"
    async with connected(served.port) as other:
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"
    writer.transport.abort()
    del reader


async def test_a_silent_peer_is_taken_for_dead_and_one_that_answers_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "_SILENT_S", 0.1)
    service = served.service
    async with connected(served.port) as alive:
        await alive.request(HANG, b"begun")
        reader, writer = await asyncio.open_connection(HOST, served.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                await reader.read()  # Until it is closed.
        writer.close()
        assert (service.hanging, service.ended, alive.is_closed) == (1, 0, False)


# ------------------------------------------------------------------ what is no HTTP/2

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_MALFORMED = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "headers on stream 0": _HELLO + b"\0\0\1\1\5\0\0\0\0\x82",
    "data on an idle stream": _HELLO + b"\0\0\1\0\0\0\0\0\1x",
    "broken hpack": _HELLO + b"\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff",
    "a frame that is too large": _HELLO + b"\xff\xff\xff\0\0\0\0\0\1",
    "a window beyond its bound": _HELLO + b"\0\0\4\x08\0\0\0\0\0\x7f\xff\xff\xff" * 2,
    "a ping of seven bytes": _HELLO + b"\0\0\7\6\0\0\0\0\0" + b"x" * 7,
    "continuations without an end": _HELLO + b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\0\0\x09\0\0\0\0\1" * 100,
    "headers without a path": _HELLO + b"\0\0\1\1\5\0\0\0\1\x83",
}


@pytest.mark.parametrize("kind", _MALFORMED)
async def test_what_breaks_the_protocol_ends_its_connection_alone(served: Served, kind: str) -> None:
    async with connected(served.port) as other:
        hanging = await other.request(HANG, b"begun")
        reader, writer = await asyncio.open_connection(HOST, served.port)
        writer.write(_MALFORMED[kind])
        writer.write_eof()
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                await reader.read()
        writer.close()
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"
        assert not hanging.is_ended


async def test_noise_harms_nobody(served: Served) -> None:
    noise = random.Random(7)
    async with connected(served.port) as other:
        for _ in range(200):
            frames = b"".join(
                noise.randrange(40).to_bytes(3, "big")
                + bytes([noise.randrange(11), noise.randrange(256)])
                + noise.choice([0, 1, 1, 3, 5, 2**31]).to_bytes(4, "big")
                + noise.randbytes(20)
                for _ in range(20)
            )
            reader, writer = await asyncio.open_connection(HOST, served.port)
            writer.write(_HELLO + frames)
            writer.write_eof()
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    await reader.read()
            writer.close()
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"


async def test_header_lists_are_bounded(served: Served) -> None:
    async with connected(served.port) as client:
        fits = await (await client.request(ECHO, b"x", [("x-long", "a" * 16_000)])).wait()
        assert fits.status == 200
        too_many = [(f"x-{number}", "a" * 8_000) for number in range(9)]
        await client.request(ECHO, b"x", too_many)
        await client.closed()
    assert client.error == ErrorCodes.ENHANCE_YOUR_CALM


# ------------------------------------------------------------------ start and stop


async def test_a_stop_lets_calls_end_and_takes_no_new_connection(served: Served) -> None:
    asked = json.dumps({"pieces": 100, "size": KIB}).encode()
    async with connected(served.port, window=10 * KIB, reads=False) as client:
        running = await client.request(COUNT, asked)
        await until(lambda: len(running.data) == 10 * KIB)
        stopping = asyncio.create_task(served.server.stop(30))
        await until(lambda: len(client.gone_away) == 2)
        assert client.gone_away == [2**31 - 1, running.number]
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(HOST, served.port)
        late = await (await client.request(ECHO, b"late")).wait()
        assert late.reset_with == ErrorCodes.REFUSED_STREAM
        assert not stopping.done()
        while not running.is_ended:
            await running.read_on()
            before = len(running.data)
            await running.wait(lambda before=before: len(running.data) > before)
        assert len(running.data) == 100 * KIB
        await client.closed()
        await asyncio.wait_for(stopping, 10)


async def test_a_call_that_outlasts_the_grace_says_that_the_service_stops(served: Served) -> None:
    async with connected(served.port) as client:
        silent, begun = await client.request(HANG), await client.request(HANG, b"begun")
        await until(lambda: served.service.hanging == 2)
        await served.server.stop(0.1)
        await client.closed()
    assert (silent.status, json.loads(silent.data)["error"]["message"]) == (503, "the service stops")
    assert begun.trailers["x-http-status"] == "503"
    assert served.service.ended == 2


async def test_a_second_stop_shortens_the_first(served: Served) -> None:
    async with connected(served.port) as client:
        await client.request(HANG, b"begun")
        await until(lambda: served.service.hanging == 1)
        patient = asyncio.create_task(served.server.stop(1000))
        await served.server.stop(0.1)
        await asyncio.wait_for(patient, 10)


async def test_two_servers_share_a_port_and_a_third_that_does_not_has_none() -> None:
    with reserved(HOST, 0) as port:
        servers = [await Served(shares_port=True).start(port) for _ in range(2)]
        served = set()
        for number in range(64):
            async with connected(port) as client:
                assert (await (await client.request(ECHO, b"x")).wait()).status == 200
                await client.request(HANG, b"x")
                served |= {one for one in servers if one.service.hanging}
            if len(served) == 2:
                break
            assert number < 63
        with pytest.raises(StartupError, match="is the port taken"):
            await Served().start(port)
        for one in servers:
            await one.server.stop(0)
