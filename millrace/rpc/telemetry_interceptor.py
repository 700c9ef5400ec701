"""The server's side of a call: one span, child of the caller's, its duration, and a log line.

The published instrumentation for grpc.aio breaks handlers that write to their context and reports cancelled streams as
OK, hence our own. A background call (telemetry/suppression.py) is not measured, and like the probes of
readiness it leaves no line at INFO.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
from grpc import StatusCode
from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import Span, SpanKind, Tracer

from millrace.deadline import DEADLINE_MARGIN_S
from millrace.rpc.handlers import Context, Continuation, Handler, guard_handler, on_first_message
from millrace.telemetry.identity import (
    PROTOCOL,
    REQUEST_ID,
    REQUEST_ID_METADATA,
    begin_request,
    current_request_id,
    links_to,
    protocol_of,
    span_id_of,
    trace_id_of,
)
from millrace.telemetry.logs import CALLS
from millrace.telemetry.rpc import LINK, UNTOLD, attributes_of, duration_histogram, end_span, name_of, status_of
from millrace.telemetry.suppression import is_tracing_suppressed

logger = logging.getLogger(CALLS)

_PROBES = (
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/millrace.rest.v1.OpenInference/Live",
    "/millrace.rest.v1.OpenInference/Ready",
)


class TelemetryServerInterceptor(grpc.aio.ServerInterceptor):
    """To be the outermost: it sees the status that the caller sees."""

    def __init__(self, tracer: Tracer | None = None, meter: Meter | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("millrace")
        self._duration = duration_histogram(meter or metrics.get_meter("millrace"), "rpc.server.call.duration")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(UNTOLD):
            return handler
        metadata = tuple(handler_call_details.invocation_metadata or ())
        streams = handler.response_streaming
        carrier = {key: value for key, value in metadata if isinstance(value, str)}

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            call = _Call(self._tracer, method, carrier, protocol_of(metadata), streams)
            if streams:
                on_first_message(call.first_message)
            code = StatusCode.OK
            try:
                yield
                code = status_of(context.code())
            except (asyncio.CancelledError, GeneratorExit):
                remaining = context.time_remaining()
                passed = remaining is not None and remaining <= DEADLINE_MARGIN_S
                code = StatusCode.DEADLINE_EXCEEDED if passed else StatusCode.CANCELLED
                raise
            except BaseException:
                code = status_of(context.code(), StatusCode.UNKNOWN)
                raise
            finally:
                call.end(code, self._duration)

        return guard_handler(handler, guard)


class _Call:
    """One call from its first moment to its end, in the task that serves it."""

    def __init__(self, tracer: Tracer, method: str, carrier: Mapping[str, str], protocol: str, streams: bool) -> None:
        parent = propagate.extract(carrier)
        self._began = time.monotonic()
        self._streams = streams
        self._first_message_s: float | None = None
        self._attributes = attributes_of(name_of(method)) | {PROTOCOL: protocol}
        request_id = carrier.get(REQUEST_ID_METADATA, "")
        self._span = self._start(tracer, method, parent, carrier.get(LINK, ""), request_id)
        self._is_measured = not is_tracing_suppressed(parent)
        self._level = logging.INFO if self._is_measured and method not in _PROBES else logging.DEBUG
        # Never detached: a call runs in a task, and so in a context, of its own.
        otel_context.attach(trace.set_span_in_context(self._span, parent))
        begin_request(request_id)

    def first_message(self) -> None:
        """The first message of an answer that streams has been written."""
        self._first_message_s = time.monotonic() - self._began
        self._span.add_event("first_message")

    def end(self, code: StatusCode, duration: Histogram) -> None:
        """Ends the span, records the duration and writes the line."""
        duration_s = time.monotonic() - self._began
        end_span(self._span, code, is_server=True, streams=self._streams)
        if self._is_measured:
            duration.record(duration_s, self._attributes | {"rpc.response.status_code": code.name})
        if logger.isEnabledFor(self._level):
            self._log(code, duration_s)

    def _start(self, tracer: Tracer, method: str, parent: otel_context.Context, link: str, request_id: str) -> Span:
        name = self._attributes["rpc.method"]
        attributes = self._attributes | {REQUEST_ID: request_id}
        if name != method.lstrip("/"):
            attributes["rpc.method_original"] = method.lstrip("/")
        return tracer.start_span(name, parent, SpanKind.SERVER, attributes, links_to(link) if link else ())

    def _log(self, code: StatusCode, duration_s: float) -> None:
        attributes: dict[str, str | float] = {
            "rpc.method": self._attributes["rpc.method"],
            "rpc.response.status_code": code.name,
            PROTOCOL: self._attributes[PROTOCOL],
            "duration_ms": round(1000 * duration_s, 3),
            "request_id": current_request_id(),
            "trace_id": trace_id_of(self._span),
            "span_id": span_id_of(self._span),
        }
        if self._first_message_s is not None:
            attributes["first_message_ms"] = round(1000 * self._first_message_s, 3)
        logger.log(
            self._level, "%s %s in %.1f ms", attributes["rpc.method"], code.name, 1000 * duration_s, extra=attributes
        )
