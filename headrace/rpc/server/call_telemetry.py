"""The server's side of a call: one span, child of the caller's, its duration, and a log line.

The published instrumentation for grpc.aio breaks handlers that write to their context and reports cancelled streams as
OK, hence our own. What is the same for every call of a method is made once. A background call
(`suppress_tracing`) is not measured, and like the probes of readiness it leaves no line at INFO.
"""

import logging
import time

from grpc import StatusCode
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, Tracer

from headrace.clients import CLIENT
from headrace.telemetry.identity import (
    CLIENT_NAME,
    PROTOCOL,
    REQUEST_ID,
    REQUEST_ID_METADATA,
    Metadata,
    begin_request,
    current_request_id,
    links_to,
    protocol_of,
)
from headrace.telemetry.rpc import (
    LINK,
    UNTOLD,
    attributes_of,
    duration_histogram,
    end_span,
    is_tracing_suppressed,
    log_call,
    name_of,
)

_PROBES = (
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/headrace.rest.v1.OpenInference/Live",
    "/headrace.rest.v1.OpenInference/Ready",
)
# Names of clients are few where they come from a key file; subjects of tokens may be many.
_MAX_CLIENTS = 100
_OTHER_CLIENTS = "other"


class ServerTelemetry:
    def __init__(self, tracer: Tracer | None = None, meter: Meter | None = None) -> None:
        self.tracer = tracer or trace.get_tracer("headrace")
        self.duration = duration_histogram(meter, "rpc.server.call.duration")
        self._clients: set[str] = set()

    def label_of(self, client: str) -> str:
        """The name of a client in metrics, which keep the first hundred apart."""
        if client not in self._clients:
            if len(self._clients) >= _MAX_CLIENTS:
                return _OTHER_CLIENTS
            self._clients.add(client)
        return client

    def of(self, method: str, streams: bool) -> "MethodTelemetry | None":
        """That of one method's calls; None for a method whose calls are not observed."""
        return None if method.startswith(UNTOLD) else MethodTelemetry(self, method, streams)


class MethodTelemetry:
    """See ServerTelemetry; `method` is the path of a call, `streams` says whether its answer does."""

    def __init__(self, server: ServerTelemetry, method: str, streams: bool) -> None:
        self.server = server
        self.streams = streams
        self.name = name_of(method)
        path = method.lstrip("/")
        original = {"rpc.method_original": path} if path != self.name else {}
        base = {protocol: attributes_of(self.name) | {PROTOCOL: protocol} for protocol in ("grpc", "http")}
        self.span_attributes = {protocol: attributes | original for protocol, attributes in base.items()}
        self._labels = {
            (protocol, code): attributes | {"rpc.response.status_code": code.name}
            for protocol, attributes in base.items()
            for code in StatusCode
        }
        self.level = logging.DEBUG if method in _PROBES else logging.INFO

    def measure(self, protocol: str, code: StatusCode, duration_s: float, client: str) -> None:
        labels = self._labels[protocol, code]
        if client:
            labels = labels | {CLIENT_NAME: self.server.label_of(client)}
        self.server.duration.record(duration_s, labels)


class ServerSpan:
    """One call, from its first moment to its end, in the task that serves it."""

    __slots__ = ("_began", "_client", "_first_message_s", "_is_measured", "_method", "_protocol", "_span")

    def __init__(self, method: MethodTelemetry, metadata: Metadata) -> None:
        self._began = time.monotonic()
        self._method = method
        self._first_message_s: float | None = None
        self._protocol = protocol_of(metadata)
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = propagate.extract(carrier)
        request_id = carrier.get(REQUEST_ID_METADATA, "")
        self._client = carrier.get(CLIENT, "")
        attributes = method.span_attributes[self._protocol] | {REQUEST_ID: request_id}
        if self._client:
            attributes[CLIENT_NAME] = self._client
        links = links_to(carrier[LINK]) if LINK in carrier else ()
        self._span = method.server.tracer.start_span(method.name, parent, SpanKind.SERVER, attributes, links)
        self._is_measured = not is_tracing_suppressed(parent)
        # Never detached: a call runs in a task, and so in a context, of its own.
        otel_context.attach(trace.set_span_in_context(self._span, parent))
        begin_request(request_id)

    def first_message(self) -> None:
        """The first message of an answer that streams has been written."""
        self._first_message_s = time.monotonic() - self._began
        self._span.add_event("first_message")

    def end(self, code: StatusCode) -> None:
        """Ends the span, records the duration and writes the line."""
        method, duration_s = self._method, time.monotonic() - self._began
        end_span(self._span, code, is_server=True, streams=method.streams)
        if self._is_measured:
            method.measure(self._protocol, code, duration_s, self._client)
        level = method.level if self._is_measured else logging.DEBUG
        named = {"rpc.method": method.name, PROTOCOL: self._protocol}
        if self._client:
            named[CLIENT_NAME] = self._client
        log_call(level, named, code, duration_s, current_request_id(), self._span, self._first_message_s)
