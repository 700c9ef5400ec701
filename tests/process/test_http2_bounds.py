"""A misbehaving peer of the HTTP/2 server affects only itself, and its use of resources is bounded."""

import asyncio
import json
import random
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from h2.errors import ErrorCodes

from headrace.rpc.http2 import connection as http2_connection
from headrace.rpc.http2 import request as http2_request
from headrace.rpc.http2.protocol import STREAM_WINDOW_BYTES
from headrace.rpc.limits.admission import Admission
from headrace.rpc.limits.byte_budget import ByteBudget
from headrace.rpc.limits.idle_calls import resident_bytes
from tests.process.http2_service import COUNT, ECHO, HANG, HOST, KIB, NAME, Served, served
from tests.support.http2_client import connected
from tests.waiting import until

ROOT = Path(__file__).parents[2]


__all__ = ["served"]  # A fixture.


# ------------------------------------------------------------------ bounds


async def test_a_slow_reader_stops_only_its_own_call(served: Served) -> None:
    window = 32 * KIB
    body = json.dumps({"pieces": 2000, "size": 500}).encode()
    async with connected(served.port, window, reads=False) as client:
        slow = await client.request(COUNT, body)
        await until(lambda: len(slow.data) == window)
        assert served.service.written <= window, "nothing is made for a reader that does not read"
        assert (await (await client.request(ECHO, b"others go on")).wait()).data == b"others go on"
        while not slow.is_ended:
            await slow.read_on()
            before = len(slow.data)
            await slow.wait(lambda before=before: len(slow.data) > before)
    assert len(slow.data) == 1_000_000


async def test_a_too_large_body_is_refused_as_soon_as_it_exceeds_the_limit(
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


async def test_admission_applies_as_for_grpc() -> None:
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


async def test_an_unread_body_sends_no_more_than_a_window(served: Served) -> None:
    """The handler of a call by GET waits, and reads no body yet."""
    async with connected(served.port) as client:
        stream = await client.request(f"{NAME}/x", verb="GET", end=False)
        await stream.wait()
        assert (stream.status, stream.data) == (200, b"x")
        assert client.http2.local_flow_control_window(stream.number) <= STREAM_WINDOW_BYTES


async def test_bodies_that_never_end_take_bounded_memory() -> None:
    """In a process of its own: the bound is of the growth of one in which nothing else grows or shrinks."""
    program = f"import asyncio; from {__name__} import send_bodies_that_never_end as send; asyncio.run(send())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT)
    assert await process.wait() == 0


async def send_bodies_that_never_end() -> None:
    served = await Served(Admission(max_unfinished=32 * KIB * KIB)).start()
    body = b"x" * 8 * KIB * KIB  # One for all: a body that was sent would free what the server takes.
    before = resident_bytes()
    async with AsyncExitStack() as opened:
        streams = []
        for _ in range(12):
            client = await opened.enter_async_context(connected(served.port))
            streams.append(await client.request(ECHO, end=False))
        sending = [asyncio.create_task(stream.send_all(body, end=False)) for stream in streams]
        try:
            await until(lambda: sum(stream.is_ended for stream in streams) >= 4)
        except AssertionError as error:
            states = [(stream.is_ended, task.done()) for stream, task in zip(streams, sending, strict=True)]
            error.add_note(f"grown by {(resident_bytes() - before) / 1e6:.0f} MB; ended, sent: {states}")
            raise
        ended = [stream for stream in streams if stream.is_ended]
        assert {(stream.status, stream.headers["retry-after-ms"]) for stream in ended} == {(429, "1000")}
        assert len(ended) < len(streams), "those that began first stay"
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await served.server.stop(0)


@pytest.mark.parametrize("kind", ["pings", pytest.param("settings", marks=pytest.mark.full)])
async def test_a_flood_of_frames_that_need_an_answer_fills_no_queue(served: Served, kind: str) -> None:
    frame = {"pings": b"\0\0\x08\6\0\0\0\0\0" + b"x" * 8, "settings": b"\0\0\0\4\0\0\0\0\0"}[kind]
    unread = socket.socket()  # The answers are not read, and few fit.
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
    unread.connect((HOST, served.port))
    reader, writer = await asyncio.open_connection(sock=unread, limit=KIB)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    sent = 0
    with suppress(TimeoutError):
        while sent < 256 * KIB * KIB:
            writer.write(frame * 10_000)
            sent += 10_000 * len(frame)
            async with asyncio.timeout(1):
                await writer.drain()
    assert sent < 64 * KIB * KIB, "the server reads no more than its answers are read"
    async with connected(served.port) as other:
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"
    writer.transport.abort()
    del reader


async def test_a_silent_peer_counts_as_dead_and_one_that_answers_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "_SILENT_S", 1.5)  # On a busy machine a peer answers late.
    service = served.service
    async with connected(served.port) as alive:
        await alive.request(HANG, b"begun")
        reader, writer = await asyncio.open_connection(HOST, served.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        with suppress(ConnectionError):
            await reader.read()  # Until the server closes it.
        writer.close()
        assert (service.hanging, service.ended, alive.is_closed) == (1, 0, False)


# ------------------------------------------------------------------ malformed HTTP/2

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_MALFORMED = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "headers on stream 0": _HELLO + b"\0\0\1\1\5\0\0\0\0\x82",
    "broken hpack": _HELLO + b"\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff",
    "a frame that is too large": _HELLO + b"\xff\xff\xff\0\0\0\0\0\1",
    "continuations without an end": _HELLO + b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\0\0\x09\0\0\0\0\1" * 100,
    "headers without a path": _HELLO + b"\0\0\1\1\5\0\0\0\1\x83",
}


async def _send_until_closed(port: int, data: bytes) -> None:
    """Sends bytes on a connection of their own, and waits until the server has closed it."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    writer.write_eof()
    with suppress(ConnectionError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("kind", _MALFORMED)
async def test_a_protocol_error_ends_only_its_connection(served: Served, kind: str) -> None:
    async with connected(served.port) as other:
        hanging = await other.request(HANG, b"begun")
        await _send_until_closed(served.port, _MALFORMED[kind])
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"
        assert not hanging.is_ended


async def test_random_bytes_affect_no_other_connection(served: Served) -> None:
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
            await _send_until_closed(served.port, _HELLO + frames)
        assert (await (await other.request(ECHO, b"others go on")).wait()).data == b"others go on"


async def test_header_lists_are_bounded(served: Served) -> None:
    async with connected(served.port) as client:
        fits = await (await client.request(ECHO, b"x", [("x-long", "a" * 16_000)])).wait()
        assert fits.status == 200
        too_many = [(f"x-{number}", "a" * 8_000) for number in range(9)]
        await client.request(ECHO, b"x", too_many)
        await client.closed()
    assert client.error == ErrorCodes.ENHANCE_YOUR_CALM
