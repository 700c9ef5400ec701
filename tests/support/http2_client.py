"""A client of HTTP/2 without TLS that can also read late, disconnect, and continue after a GOAWAY.

At the end are frames that it never sends: of calls of gRPC whose message stays incomplete.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings

from tests.waiting import until

_READ_BYTES = 65_536
_CONNECTION_WINDOW_BYTES = 1 << 28


class Http2Stream:
    """One request and the received part of its answer."""

    def __init__(self, client: "Http2Client", number: int) -> None:
        self.number = number
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.data = b""
        self.reset_with: int | None = None
        self.is_ended = False
        self._client = client
        self._unread = 0

    @property
    def status(self) -> int:
        return int(self.headers[":status"])

    async def wait(self, condition: Any = None) -> "Http2Stream":
        """Returns once the answer has ended, or the condition holds."""
        async with self._client.news:
            await self._client.news.wait_for(
                lambda: self.is_ended or self._client.is_closed or (condition is not None and condition())
            )
        return self

    async def send(self, data: bytes, end: bool = False) -> None:
        """Sends a part of the body, without regard to the window."""
        self._client.http2.send_data(self.number, data, end)
        await self._client.flush()

    async def send_all(self, data: bytes, end: bool = True) -> None:
        """Sends the rest of the body, as the window opens."""
        at, http2 = 0, self._client.http2
        while at < len(data) and not (self.is_ended or self._client.is_closed):
            room = min(http2.local_flow_control_window(self.number), http2.max_outbound_frame_size)
            if room > 0:
                await self.send(data[at : at + room], end and at + room >= len(data))
                at += room
            else:
                await self.wait(lambda: http2.local_flow_control_window(self.number) > 0)

    async def reset(self) -> None:
        self._client.http2.reset_stream(self.number, ErrorCodes.CANCEL)
        await self._client.flush()

    async def read_on(self) -> None:
        """Opens the window by the received bytes."""
        size, self._unread = self._unread, 0
        if size:
            self._client.http2.acknowledge_received_data(size, self.number)
            await self._client.flush()

    def take(self, event: events.DataReceived) -> None:
        self.data += event.data
        self._unread += event.flow_controlled_length


class Http2Client:
    """One connection; made by `connected`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int, reads: bool) -> None:
        self.http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.http2.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.writer = writer
        self.news = asyncio.Condition()
        self.is_closed = False
        self.gone_away: list[int] = []  # The last stream of each GOAWAY.
        self.error: int | None = None  # The error code of the last GOAWAY.
        self._reader = reader
        self._reads = reads
        self._streams: dict[int, Http2Stream] = {}

    async def request(
        self,
        path: str,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        verb: str = "POST",
        end: bool = True,
    ) -> Http2Stream:
        """Begins a request; without `end` its body continues."""
        number = self.http2.get_next_available_stream_id()
        stream = self._streams[number] = Http2Stream(self, number)
        head = [(":method", verb), (":path", path), (":scheme", "http"), (":authority", "test"), *headers]
        self.http2.send_headers(number, head, end_stream=end and not body)
        if body:
            self.http2.send_data(number, body, end)
        await self.flush()
        return stream

    async def post(self, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> Http2Stream:
        """A request of any size, and its whole answer."""
        stream = await self.request(path, b"", headers, end=not body)
        await stream.send_all(body)
        return await stream.wait()

    async def flush(self) -> None:
        self.writer.write(self.http2.data_to_send())
        await self.writer.drain()

    async def closed(self) -> None:
        async with self.news:
            await self.news.wait_for(lambda: self.is_closed)

    async def read(self) -> None:
        """Reads until the connection ends."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                await self._receive(data)
        except ConnectionError:
            pass
        finally:
            async with self.news:
                self.is_closed = True
                self.news.notify_all()

    async def _receive(self, data: bytes) -> None:
        while data:
            # h2 reads nothing after a GOAWAY: it gets one frame at a time, without GOAWAYs.
            size = 9 + int.from_bytes(data[:3], "big")
            while len(data) < size:
                data += await self._reader.readexactly(size - len(data))
            frame, data = data[:size], data[size:]
            if frame[3] == 7:
                self.gone_away.append(int.from_bytes(frame[9:13], "big"))
                self.error = int.from_bytes(frame[13:17], "big")
                continue
            for event in self.http2.receive_data(frame):
                await self._take(event)
        await self.flush()
        async with self.news:
            self.news.notify_all()

    async def _take(self, event: events.Event) -> None:
        match event:
            case events.ResponseReceived():
                self._streams[event.stream_id].headers = dict(event.headers)
            case events.TrailersReceived():
                self._streams[event.stream_id].trailers = dict(event.headers)
            case events.DataReceived():
                stream = self._streams[event.stream_id]
                stream.take(event)
                if self._reads:
                    await stream.read_on()
            case events.StreamEnded():
                self._streams[event.stream_id].is_ended = True
            case events.StreamReset():
                stream = self._streams[event.stream_id]
                stream.reset_with = event.error_code
                stream.is_ended = True


@asynccontextmanager
async def connected(port: int, window: int = 1 << 20, reads: bool = True) -> AsyncIterator[Http2Client]:
    """A connection; `window` is that of each stream, and with `reads` data is read at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Http2Client(reader, writer, window, reads)
    client.http2.initiate_connection()
    client.http2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
    await client.flush()
    reading = asyncio.create_task(client.read())
    try:
        await until(
            lambda: client.http2.outbound_flow_control_window > _READ_BYTES
        )  # The server's settings have arrived.
        yield client
    finally:
        writer.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW = 4  # Identifier of the setting.


def frame(kind, flags, stream, contents):
    return len(contents).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + contents


def headers(path):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    literal = b""
    for name, value in fields.items():
        literal += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return literal
