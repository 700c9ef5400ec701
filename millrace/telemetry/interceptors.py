"""One span for each call on each side, joined over hops by W3C trace context.

The published instrumentation for grpc.aio breaks handlers that write to their context, reports
cancelled streams as OK and leaks client spans, hence our own. Names and attributes follow
OpenTelemetry's RPC conventions: `rpc.system.name`, `rpc.method`, `rpc.response.status_code`.
Health, reflection, the payload ingest, one call that lasts for days, and the gateway's access log are not traced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import StatusCode
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status
from opentelemetry.trace import StatusCode as SpanStatus

from millrace.interceptors import Context, Continuation, Handler, guard_handler

_UNTRACED = (
    "/grpc.health.",
    "/grpc.reflection.",
    "/millrace.v1.PayloadIngest/",
    "/opentelemetry.proto.collector.logs.v1.LogsService/",
)
_tracer = trace.get_tracer("millrace")

# A server's span is in error only where the server is to blame, as the conventions say.
_SERVER_FAULTS = {
    StatusCode.UNKNOWN,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.UNIMPLEMENTED,
    StatusCode.INTERNAL,
    StatusCode.UNAVAILABLE,
    StatusCode.DATA_LOSS,
}


class TracingServerInterceptor(grpc.aio.ServerInterceptor):
    """Opens a server span, child of the caller's, around each call."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_UNTRACED):
            return handler

        carrier = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            parent = propagate.extract(carrier)
            span = _start(method, SpanKind.SERVER, parent)
            # Never detached: a call runs in a task, and so in a context, of its own.
            otel_context.attach(trace.set_span_in_context(span, parent))
            code = StatusCode.OK
            try:
                yield
                code = _status(context.code())
            except (asyncio.CancelledError, GeneratorExit):
                remaining = context.time_remaining()
                code = (
                    StatusCode.DEADLINE_EXCEEDED if remaining is not None and remaining <= 0 else StatusCode.CANCELLED
                )
                raise
            except BaseException:
                code = _status(context.code(), StatusCode.UNKNOWN)
                raise
            finally:
                _end(span, code, in_error=code in _SERVER_FAULTS)

        return guard_handler(handler, guard)


def _start(method: str, kind: SpanKind, parent: otel_context.Context | None) -> Span:
    name = method.lstrip("/")
    return _tracer.start_span(name, parent, kind, {"rpc.system.name": "grpc", "rpc.method": name})


def _end(span: Span, code: StatusCode, in_error: bool) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    if in_error:
        span.set_status(Status(SpanStatus.ERROR, code.name))
    span.end()


def _status(code: Any, default: StatusCode = StatusCode.OK) -> StatusCode:
    """What a context's `code()` says, which is an enum, a number or nothing yet."""
    if isinstance(code, StatusCode):
        return code
    for status in StatusCode:
        if status.value[0] == code:
            return default if status is StatusCode.OK else status
    return default


@contextmanager
def _client_span(details: Any) -> Iterator[tuple[Any, Span]]:
    """A client span and the call details that carry it; ended here only where the block fails."""
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    span = _start(method, SpanKind.CLIENT, None)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
    try:
        yield details._replace(metadata=metadata), span
    except BaseException as error:
        _end_client(span, StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else StatusCode.UNKNOWN)
        raise


def _end_when_done(call: Any, span: Span) -> None:
    """Ends the span with its call, whether that is read to the end, cancelled or dropped."""
    call.add_done_callback(lambda call: _end_client(span, _code_of_done(call)))


def _end_client(span: Span, code: StatusCode) -> None:
    _end(span, code, in_error=code is not StatusCode.OK)


def _code_of_done(call: Any) -> StatusCode:
    # The code of a call that is done is at hand, but only behind a coroutine, and a callback cannot wait.
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        code: StatusCode = stop.value
        return code
    coroutine.close()
    return StatusCode.UNKNOWN


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        with _client_span(client_call_details) as (details, span):
            call = await continuation(details, request)
            _end_when_done(call, span)
            return call


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        with _client_span(client_call_details) as (details, span):
            call = await continuation(details, request)
            _end_when_done(call, span)
            return call


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        with _client_span(client_call_details) as (details, span):
            call = await continuation(details, request_iterator)
            _end_when_done(call, span)
            return call


def tracing_client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors that open a client span around each call and send its context along."""
    return (_UnaryUnary(), _UnaryStream(), _StreamStream())
