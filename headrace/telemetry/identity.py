"""The identity of a call: the ids that spans, log lines and payload records have in common.

The trace and the span are OpenTelemetry's; the request's id is the caller's own, the gateway's, or a new one, and goes
from hop to hop as the metadata `x-request-id`. All belong to the current task.
"""

from collections.abc import Sequence
from contextvars import ContextVar

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

REQUEST_ID = "headrace.request_id"
REQUEST_ID_METADATA = "x-request-id"
PROTOCOL = "headrace.protocol"
CLIENT_NAME = "headrace.client"
MODEL = "gen_ai.request.model"
# What the gateway adds to a REST request whose path it has made a method's; from clients it is not accepted.
TRANSCODED = "x-envoy-original-path"

_W3C = TraceContextTextMapPropagator()

Metadata = Sequence[tuple[str, str | bytes]]

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """The id of the request that this task serves, or "" outside of one."""
    return _request_id.get()


def begin_request(value: str) -> None:
    """Sets the id of the request that this task serves; its span has the id already."""
    _request_id.set(value)


def set_request_id(value: str) -> None:
    """Replaces the id of the request that this task serves, also in the current span."""
    if value != _request_id.get():
        _request_id.set(value)
        trace.get_current_span().set_attribute(REQUEST_ID, value)


def span_id_of(span: Span | None = None) -> str:
    """The id of a span, None for the current one, in hexadecimal; "" where there is none."""
    context = (span or trace.get_current_span()).get_span_context()
    return trace.format_span_id(context.span_id) if context.is_valid else ""


def trace_id_of(span: Span | None = None) -> str:
    """The same of its trace."""
    context = (span or trace.get_current_span()).get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def traceparent_of(span: Span) -> str:
    """A span as W3C's traceparent, or "" where there is none."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    ids = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    return f"00-{ids[0]}-{ids[1]}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> Context:
    """The context of the span that a traceparent names; an empty one if it names none."""
    return _W3C.extract({"traceparent": traceparent}, Context())


def links_to(traceparent: str) -> list[Link]:
    """A link to the span that a traceparent names, if it names one."""
    context = trace.get_current_span(context_of(traceparent)).get_span_context()
    return [Link(context)] if context.is_valid else []


def protocol_of(metadata: Metadata) -> str:
    """The protocol between caller and gateway: "grpc" (gRPC-Web too), or "http" for REST and its event streams."""
    return "http" if any(key == TRANSCODED for key, _ in metadata) else "grpc"


def as_metadata(value: str) -> str:
    """Text as gRPC metadata allows it: printable ASCII."""
    if value.isascii() and value.isprintable():
        return value
    return "".join(c if " " <= c <= "~" else "?" for c in value)


def carried_headers(context: Context | None = None) -> dict[str, str]:
    """The metadata or headers that identify the call at the next hop."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    if request_id := current_request_id():
        carrier[REQUEST_ID_METADATA] = as_metadata(request_id)
    return carrier
