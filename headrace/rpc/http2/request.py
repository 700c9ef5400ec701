"""A request as it arrives: its head, and its body piece by piece."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.errors import TooLargeError
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES

_TIMEOUT = "grpc-timeout"
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_DIGITS = 8
_NOT_METADATA = frozenset({_TIMEOUT, "te"})

Pairs = tuple[tuple[str, str], ...]


class RequestHead(NamedTuple):
    """`metadata` are the headers as a gRPC call has them, `timeout_s` is the value of `grpc-timeout`."""

    verb: str
    path: str
    metadata: Pairs
    timeout_s: float | None


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> RequestHead:
    """Reads the headers of a request; a value that is not UTF-8 is decoded as Latin-1, as gRPC does."""
    verb = path = ""
    timeout_s = None
    metadata = []
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        try:
            value = raw_value.decode()
        except UnicodeDecodeError:
            value = raw_value.decode("latin-1")
        if name == ":path":
            path = value
        elif name == ":method":
            verb = value
        elif name == _TIMEOUT:
            timeout_s = seconds_of(value)
        elif not name.startswith(":") and name not in _NOT_METADATA:
            metadata.append((name, value))
    return RequestHead(verb, path, tuple(metadata), timeout_s)


class RequestBody:
    """A body of up to MAX_MESSAGE_BYTES. `acknowledge` is called with the bytes by which the window may open.

    Until `read` is called the window does not open, so that at most one window of the body arrives.
    """

    __slots__ = ("_acknowledge", "_pieces", "_reader", "_size", "is_complete", "unread")

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self.is_complete = False
        self.unread = 0  # Bytes that are not acknowledged, frames and padding included.
        self._acknowledge = acknowledge
        self._pieces: list[bytes] = []
        self._size = 0
        self._reader: asyncio.Future[None] | None = None

    def receive(self, data: bytes, size: int) -> None:
        """A piece, which took `size` bytes of the window."""
        self.unread += size
        if self._size <= MAX_MESSAGE_BYTES:
            self._pieces.append(data)
            self._size += len(data)
        self._wake()

    def complete(self) -> None:
        """Marks its end."""
        self.is_complete = True
        self._wake()

    async def read(self) -> bytes:
        """All of it, once; raises TooLargeError."""
        while True:
            self.acknowledge()
            if self._size > MAX_MESSAGE_BYTES:
                self._pieces.clear()
                raise TooLargeError(f"the request is larger than {MAX_MESSAGE_BYTES >> 20} MiB")
            if self.is_complete:
                break
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def acknowledge(self) -> None:
        """Opens the window by the bytes received."""
        unread, self.unread = self.unread, 0
        self._acknowledge(unread)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def seconds_of(grpc_timeout: str) -> float | None:
    """The value of gRPC's header, digits and a unit; None where it is neither."""
    digits, unit = grpc_timeout[:-1], grpc_timeout[-1:]
    if unit not in _UNIT_S or not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS):
        return None
    return int(digits) * _UNIT_S[unit]
