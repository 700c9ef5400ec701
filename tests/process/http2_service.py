"""A service behind the HTTP/2 server, for its tests."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.api.httpbody_pb2 import HttpBody

from headrace.errors import OverloadedError
from headrace.rpc.http2.request import Argument, HttpMethod
from headrace.rpc.http2.server import HttpServer
from headrace.rpc.limits.admission import Admission, AdmittedCall, head_of_call
from headrace.rpc.server.handlers import Interceptor
from headrace.telemetry.identity import Metadata
from headrace_transformer.frontends.http import error_body, http_methods
from headrace_transformer.frontends.openai.errors import openai_error

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
        """As many pieces of as many bytes as the request says."""
        message = json.loads(request)
        for _ in range(message["pieces"]):
            yield HttpBody(content_type=EVENTS, data=b"x" * message["size"])
            self.written += message["size"]

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

    async def name(self, request: Argument, context: Any) -> AsyncIterator[HttpBody]:
        yield HttpBody(content_type="text/plain", data=request.named("model").encode())

    def methods(self) -> list[HttpMethod]:
        posted = {ECHO: self.echo, COUNT: self.count, FAIL: self.fail, HANG: self.hang}
        return [
            *(HttpMethod(path[1:], behaviour) for path, behaviour in posted.items()),
            HttpMethod(NAME[1:], self.name, takes_body=False),
        ]


class Served:
    def __init__(self, admission: Admission | None = None, shares_port: bool = False) -> None:
        self.service = Service()
        self.server = HttpServer(Interceptor("transformer", admission), error_body(openai_error), shares_port)
        self.server.add(*self.service.methods())
        self.port = 0

    async def start(self, port: int = 0) -> "Served":
        self.port = await self.server.start(HOST, port)
        return self


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    running = await Served().start()
    yield running
    await running.server.stop(0)


class Uncounted(Admission):
    """Has no limits of clients."""

    def call(self, method: str, request_streaming: bool, metadata: Metadata = ()) -> AdmittedCall:
        return super().call(method, request_streaming)


async def serve_openai(port: int, servicer: Any) -> HttpServer:
    """Serves OpenAI's API by a fake."""
    server = HttpServer(Interceptor("transformer", Uncounted()), error_body(openai_error))
    server.add(*http_methods("OpenAI", servicer, openai_error))
    await server.start(HOST, port)
    return server
