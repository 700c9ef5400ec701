"""The client's side of a call: one span around it, its duration, and its error as the `HeadraceError` that it was.

A background call (`suppress_tracing`) has neither span nor duration. The span ends with the call, whether that is
read to the end, cancelled or dropped. grpc.aio takes a client interceptor for one kind of call only, hence one class a
kind.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
from grpc import StatusCode
from opentelemetry import trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer

from headrace.deadline import DEADLINE_MARGIN_S
from headrace.errors import from_rpc_error
from headrace.telemetry.identity import (
    REQUEST_ID,
    carried_headers,
    current_request_id,
    links_to,
    traceparent_of,
)
from headrace.telemetry.rpc import (
    LINK,
    UNTOLD,
    attributes_of,
    duration_histogram,
    end_span,
    is_tracing_suppressed,
    name_of,
)

Intercept = Callable[[Any, Any, Any], Awaitable[Any]]  # Takes the continuation, the call's details and its request.

_hooks: "ContextVar[ClientSpan | None]" = ContextVar("call_span", default=None)


class ClientSpan:
    """The span of one call of the caller's: the next one of a channel, or one that `ClientSpans.begin` begins.

    `follows` is the traceparent of the call that this one resumes: the client's span and the server's link to it.
    `answered_by` is that of the server's span, if the answer has it.
    """

    def __init__(self, follows: str = "") -> None:
        self.follows = follows
        self.answered_by = ""
        self._span: Span = INVALID_SPAN
        self._end: Callable[[StatusCode], None] | None = None
        self._has_message = False

    @contextmanager
    def of_next_call(self) -> Iterator[None]:
        """The call is made inside of the block."""
        token = _hooks.set(self)
        try:
            yield
        finally:
            _hooks.reset(token)

    def began(self, span: Span, end: Callable[[StatusCode], None]) -> None:
        self._span, self._end = span, end

    def end(self, code: StatusCode) -> None:
        """Ends a call that `ClientSpans.begin` began; only the first end has an effect."""
        end, self._end = self._end, None
        if end is not None:
            end(code)

    def message(self) -> None:
        """A message of the answer has been read; the first one is an event."""
        if not self._has_message:
            self._has_message = True
            self._span.add_event("first_message")

    @property
    def traceparent(self) -> str:
        """Of the span, as W3C writes it; "" where there is none."""
        return traceparent_of(self._span)


class ClientSpans:
    """Opens and ends the spans of one channel's calls."""

    def __init__(self, tracer: Tracer | None = None, meter: Meter | None = None, streams: bool = True) -> None:
        self._streams = streams
        self._tracer = tracer or trace.get_tracer("headrace")
        self._duration = duration_histogram(meter, "rpc.client.call.duration")

    async def call(self, continuation: Any, details: Any, request: Any) -> Any:
        """Makes the call in its own span, unless tracing is suppressed."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method.startswith(UNTOLD) or is_tracing_suppressed():
            return await continuation(_with_metadata(details, carried_headers()), request)
        carried, end = self.open(method, details.timeout)
        try:
            call = await continuation(_with_metadata(details, carried), request)
        except BaseException as error:
            end(StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else StatusCode.UNKNOWN)
            raise
        call.add_done_callback(lambda call: end(_code_of_done(call)))
        return call

    def open(self, method: str, timeout_s: float | None) -> tuple[dict[str, str], Callable[[StatusCode], None]]:
        """Begins the span of the next call; returns the metadata that carry its context, and what ends the span."""
        hook = _hooks.get()
        span, end = self.begin(method, timeout_s, hook)
        carried = carried_headers(trace.set_span_in_context(span))
        if hook is not None and hook.follows:
            carried[LINK] = hook.follows
        return carried, end

    def begin(
        self, method: str, timeout_s: float | None, hook: ClientSpan | None
    ) -> tuple[Span, Callable[[StatusCode], None]]:
        """Begins the span of a call; `hook` can end it too, where messages of another call carry the call."""
        began, attributes = time.monotonic(), attributes_of(name_of(method))
        links = links_to(hook.follows) if hook is not None and hook.follows else ()
        named = attributes | {REQUEST_ID: current_request_id()}
        span = self._tracer.start_span(attributes["rpc.method"], None, SpanKind.CLIENT, named, links)

        def end(code: StatusCode) -> None:
            duration_s = time.monotonic() - began
            if code is StatusCode.CANCELLED and timeout_s is not None:
                # The waiting task may notice the same deadline first, and cancel the call.
                code = code if duration_s < timeout_s - DEADLINE_MARGIN_S else StatusCode.DEADLINE_EXCEEDED
            end_span(span, code, is_server=False, streams=self._streams)
            self._duration.record(duration_s, attributes | {"rpc.response.status_code": code.name})

        if hook is not None:
            hook.began(span, end)
        return span, end


class _Interceptor:
    def __init__(self, intercept: Intercept) -> None:
        self._intercept = intercept


class _UnaryUnary(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._intercept(continuation, client_call_details, request)


class _UnaryStream(_Interceptor, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._intercept(continuation, client_call_details, request)


class _StreamStream(_Interceptor, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._intercept(continuation, client_call_details, request_iterator)


def client_interceptors(
    hop: str, tracer: Tracer | None = None, meter: Meter | None = None
) -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors for a channel to `hop`: a span around each call, which goes along, and errors as `HeadraceError`."""
    of_one, of_many = ClientSpans(tracer, meter, streams=False), ClientSpans(tracer, meter, streams=True)

    async def one(continuation: Any, details: Any, request: Any) -> Any:
        call = await of_one.call(continuation, details, request)
        try:
            # Not `call.code()`: a caller that is cancelled while it waits must cancel the call as well.
            await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, hop) from None
        return call  # Its response can be awaited again.

    async def many(continuation: Any, details: Any, request: Any) -> Any:
        return _translated(await of_many.call(continuation, details, request), hop)

    return (_UnaryUnary(one), _UnaryStream(many), _StreamStream(many))


async def _translated(call: Any, hop: str) -> AsyncIterator[Any]:
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, hop) from None
    finally:
        # grpc.aio does not cancel a call whose reader is cancelled before its first response.
        call.cancel()


def _with_metadata(details: Any, carried: dict[str, str]) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), *carried.items()))


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
