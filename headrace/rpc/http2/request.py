"""A request as it arrives: its head, its body piece by piece, and the method that it is for, by its path.

A method has a handler like those of gRPC: it takes a request, which is a body or an Argument, and a context, and yields
bodies. So telemetry, admission and error mapping (headrace/rpc/server/handlers.py) are the same for both.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import grpc
from google.api.httpbody_pb2 import HttpBody

from headrace.errors import HeadraceError, TooLargeError
from headrace.rpc import Context, Handler
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES
from headrace.rpc.limits.request_reading import RequestReading
from headrace.rpc.server.handlers import Interceptor, ServedMethod

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


Behaviour = Callable[[Any, Context], AsyncGenerator[HttpBody, None]]
ErrorBody = Callable[[HeadraceError], bytes]  # The JSON of an error before the first byte of an answer.


class Argument(NamedTuple):
    """Of a request without a body: the rest of the path after the method's name, and the query's last values."""

    rest: str
    query: Mapping[str, str]

    def named(self, parameter: str) -> str:
        """The rest of the path, else the query's parameter; "" for neither."""
        return self.rest or self.query.get(parameter, "")


@dataclass(frozen=True)
class HttpMethod:
    """`name` is the method's full name, "package.Service/Method", which is its path too.

    With `takes_body` it is called by POST with a body, otherwise by GET, or by another `verb`, with an Argument.
    `error_body` is None where errors have the shape of the server's other methods.
    """

    name: str
    behaviour: Behaviour
    takes_body: bool = True
    error_body: ErrorBody | None = None
    verb: str = ""


class MethodTable:
    """The methods of one server; `hop` signs errors, which have the shape of `error_body`."""

    def __init__(self, interceptor: Interceptor, error_body: ErrorBody) -> None:
        self.hop = interceptor.hop
        self.error_body = error_body
        self._interceptor = interceptor
        self._methods: dict[str, tuple[HttpMethod, ServedMethod]] = {}

    def add(self, *methods: HttpMethod) -> None:
        for method in methods:
            path = f"/{method.name}"
            handler: Handler = grpc.unary_stream_rpc_method_handler(method.behaviour)
            reading = RequestReading(None, lambda request: request)
            self._methods[path] = method, ServedMethod(self._interceptor, path, handler, reading)

    def find(self, verb: str, path: str) -> tuple[HttpMethod, ServedMethod, Argument | None] | None:
        """The method that a request is for, and its argument where it takes no body; `path` may have a query.

        None for an unknown path or verb.
        """
        path, _, query = path.partition("?")
        found, rest = self._methods.get(path), ""
        if found is None:
            path, _, rest = path.rpartition("/")
            found = self._methods.get(path)
            if found is None or found[0].takes_body or not rest:
                return None
        method, served = found
        if verb != (method.verb or ("POST" if method.takes_body else "GET")):
            return None
        argument = None if method.takes_body else Argument(unquote(rest), dict(parse_qsl(query)))
        return method, served, argument
