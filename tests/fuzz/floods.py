"""Attacks by connections, frames and bytes: HTTP by hand, since no client library sends these.

An attacker must be cheap, or it takes the processor that it shares with the stack: frames are built once, answers are
discarded unread, and each flood has a pace.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace_protos import headrace_pb2
from tests.fuzz.target import Target, attack
from tests.support.http2_client import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW,
    RST_STREAM,
    SETTINGS,
    frame,
    headers,
)

CONTINUATION = 9
HELD = 500  # Connections, or streams, that are held.
_STREAMS = 50  # Of one connection.
_OPENED_AT_ONCE = 25  # Connections, so that the kernel's queue of new ones does not overflow.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CANCEL = (8).to_bytes(4)
_METADATA = "/inference.GRPCInferenceService/ServerMetadata"
_GENERATE = "/headrace.v1.TextGeneration/Generate"
_READ_BYTES = 1 << 16

Fields = dict[str, str]


def _literal(fields: Fields) -> bytes:
    """Headers without compression and without an entry in the table; names and values of less than 127 bytes."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


class Connection:
    """One HTTP/2 or raw connection; received bytes are discarded until it is closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next = 1
        self._drain = asyncio.create_task(self._throw_away(), name="answers")

    @classmethod
    async def opened(cls, target: Target, first: bytes) -> "Connection":
        connection = cls(*await target.connect())
        connection._writer.write(first)
        return connection

    @classmethod
    async def http2(cls, target: Target, window: int = 65_535) -> "Connection":
        return await cls.opened(target, _PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, window)))

    @property
    def is_open(self) -> bool:
        return not self._drain.done()

    def stream(self) -> int:
        """The number of a new stream."""
        self._next += 2
        return self._next - 2

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError if the gateway has closed the connection."""
        self._writer.write(data)
        await self._writer.drain()

    async def _throw_away(self) -> None:
        with suppress(ConnectionError):
            while await self._reader.read(_READ_BYTES):
                pass

    async def close(self) -> None:
        self._drain.cancel()
        self._writer.close()
        await asyncio.gather(self._drain, self._writer.wait_closed(), return_exceptions=True)


async def _many(target: Target, count: int, one: Callable[[], Awaitable[None]]) -> None:
    """Runs `one` `count` times side by side until the end, and again whenever it has ended."""
    opening = asyncio.Semaphore(_OPENED_AT_ONCE)

    async def again_and_again() -> None:
        while target.left_s:
            async with opening:
                target.report.begun += 1
            try:
                await one()
                target.report.answers["held"] += 1
            except OSError as error:
                target.report.answers[type(error).__name__] += 1
            await asyncio.sleep(min(0.1, target.left_s))

    await asyncio.gather(*(again_and_again() for _ in range(count)))


async def _drip(target: Target, connection: Connection, piece: Callable[[], bytes], every_s: float) -> None:
    """Sends a piece every `every_s` seconds until the end, or until the gateway closes; then closes."""
    try:
        while connection.is_open and target.left_s:
            if data := piece():
                await connection.send(data)
            await asyncio.sleep(min(every_s, target.left_s))
        if not connection.is_open:
            target.report.answers["closed"] += 1
    finally:
        await connection.close()


# ----------------------------------------------------------------------------------------- held connections


@attack
async def slow_headers(target: Target) -> None:
    """500 connections that send a header's byte each second, half of them over HTTP/2 (slow-loris)."""
    turn = iter(range(1 << 30))

    async def one() -> None:
        if next(turn) % 2:
            connection = await Connection.opened(target, b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nx-slow: ")
            await _drip(target, connection, lambda: b"a", 1.0)
            return
        connection = await Connection.http2(target)
        await connection.send(frame(HEADERS, 0, connection.stream(), headers(_METADATA)))
        await _drip(target, connection, lambda: b"", 1.0)

    await _many(target, HELD, one)


@attack
async def slow_readers(target: Target) -> None:
    """500 unread answers: streams with a window of zero bytes, 10 of them generations."""
    request = headrace_pb2.GenerateRequest(model="storyteller", prompt="Once", max_tokens=64, ignore_eos=True)
    message = request.SerializeToString()
    data = b"\0" + len(message).to_bytes(4) + message
    script = _literal({":method": "GET", ":scheme": "http", ":path": "/playground/record.js", ":authority": "gateway"})

    async def one() -> None:
        connection = await Connection.http2(target, window=0)
        for number in range(_STREAMS):
            stream = connection.stream()
            if number == 0:
                await connection.send(
                    frame(HEADERS, END_HEADERS, stream, headers(_GENERATE)) + frame(DATA, END_STREAM, stream, data)
                )
            else:
                await connection.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, script))
        await _drip(target, connection, lambda: b"", 1.0)

    await _many(target, HELD // _STREAMS, one)


# ------------------------------------------------------------------------------------------------- frames


@attack
async def rapid_resets(target: Target) -> None:
    """10,000 calls a second that are reset as soon as they have begun."""

    async def one() -> None:
        connection = await Connection.http2(target)

        def batch() -> bytes:
            streams = [connection.stream() for _ in range(50)]
            target.report.begun += len(streams)
            return b"".join(
                frame(HEADERS, END_HEADERS, stream, headers(_METADATA)) + frame(RST_STREAM, 0, stream, _CANCEL)
                for stream in streams
            )

        await _drip(target, connection, batch, 0.02)

    await _many(target, 4, one)


@attack
async def header_bombs(target: Target) -> None:
    """Calls whose 12 KB of headers refer 12,000 times to a header of 4 KB in the connection's table (HPACK)."""
    value = b"a" * 4000
    # A literal with an entry in the table; the length takes 7 bits, and more after that.
    entry = b"\x40\x01x\x7f" + bytes([(len(value) - 127) & 0x7F | 0x80, (len(value) - 127) >> 7]) + value
    first, bomb = headers(_METADATA) + entry, headers(_METADATA) + b"\xbe" * 12_000

    async def one() -> None:
        connection = await Connection.http2(target)
        await connection.send(frame(HEADERS, END_HEADERS | END_STREAM, connection.stream(), first))

        def call() -> bytes:
            target.report.begun += 1
            return frame(HEADERS, END_HEADERS | END_STREAM, connection.stream(), bomb)

        await _drip(target, connection, call, 0.02)

    await _many(target, 4, one)


@attack
async def continuation_floods(target: Target) -> None:
    """Headers that never end: CONTINUATION frames of 8 KB, and of none."""
    field = b"\0\x01x\x7f" + bytes([(8000 - 127) & 0x7F | 0x80, (8000 - 127) >> 7]) + b"a" * 8000
    turn = iter(range(1 << 30))

    async def one() -> None:
        connection = await Connection.http2(target)
        stream = connection.stream()
        more = frame(CONTINUATION, 0, stream, field if next(turn) % 2 else b"")
        await connection.send(frame(HEADERS, 0, stream, headers(_METADATA)))
        await _drip(target, connection, lambda: more * 10, 0.02)

    await _many(target, 4, one)
