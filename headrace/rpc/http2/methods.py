"""The methods of an HTTP server, by their path.

A method has a handler like those of gRPC: it takes a request, which is a body or an Argument, and a context, and yields
bodies. So telemetry, admission and error mapping (headrace/rpc/server/handlers.py) are the same for both.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import grpc
from google.api.httpbody_pb2 import HttpBody

from headrace.errors import HeadraceError
from headrace.rpc import Context, Handler
from headrace.rpc.limits.request_reading import RequestReading
from headrace.rpc.server.handlers import Interceptor, ServedMethod

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
