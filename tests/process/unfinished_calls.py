"""Calls of gRPC whose message stays incomplete: HTTP/2 by hand, since no client library does that."""

import asyncio
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
FRAME_BYTES = 16_384
INITIAL_WINDOW = 4  # Identifier of the setting.


class UnfinishedCalls:
    """One connection; `ended` has the streams that the server has ended, `sent` the bytes sent on each."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._windows = {0: 65_535}
        self._initial = 65_535
        self._news = asyncio.Event()
        self.ended = set()
        self.sent = {}
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connected(cls, port):
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, path, calls, size):
        """Opens `calls` calls and sends `size` bytes of a longer message, as far as flow control allows."""
        streams = range(2 * len(self.sent) + 1, 2 * (len(self.sent) + calls) + 1, 2)
        for stream in streams:
            self._windows[stream], self.sent[stream] = self._initial, 0
            self._writer.write(frame(HEADERS, END_HEADERS, stream, headers(path)))
        await asyncio.gather(*(self._send(stream, struct.pack(">BI", 0, size), size - 1) for stream in streams))

    async def _send(self, stream, prefix, size):
        first, left = prefix, size + len(prefix)
        while left and stream not in self.ended:
            count = min(left, FRAME_BYTES, self._windows[0], self._windows[stream])
            if count < min(left, len(prefix)):
                self._news.clear()
                await self._news.wait()
                continue
            contents = first + bytes(count - len(first))
            first = b""
            self._writer.write(frame(DATA, 0, stream, contents))
            self._windows[0] -= count
            self._windows[stream] -= count
            self.sent[stream] += count
            left -= count
            await self._writer.drain()

    async def _read(self):
        while True:
            head = await self._reader.readexactly(9)
            size, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
            contents = await self._reader.readexactly(size)
            if kind == SETTINGS and not flags & ACK:
                for identifier, value in struct.iter_unpack(">HI", contents):
                    if identifier == INITIAL_WINDOW:
                        for each in self.sent:
                            self._windows[each] += value - self._initial
                        self._initial = value
                self._writer.write(frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self._writer.write(frame(PING, ACK, 0, contents))
            elif kind == WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(contents)
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.ended.add(stream)
            elif kind == GOAWAY:
                self.ended.update(self.sent)
            self._news.set()

    async def close(self):
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)


def frame(kind, flags, stream, contents):
    return len(contents).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + contents


def headers(path):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    literal = b""
    for name, value in fields.items():
        literal += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return literal
