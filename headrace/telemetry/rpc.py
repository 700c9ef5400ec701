"""A gRPC call by OpenTelemetry's conventions for RPC: names, attributes, statuses, durations.

Source: OpenTelemetry semantic conventions, "gRPC" and "RPC metrics".
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pool
from grpc import StatusCode
from opentelemetry import context, trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, Status
from opentelemetry.trace import StatusCode as SpanStatus

from headrace.telemetry.gathered import Gathered, histogram
from headrace.telemetry.identity import span_id_of, trace_id_of
from headrace.telemetry.logs import call_log

# Neither traced nor measured: health and reflection, which Envoy and Docker call constantly; internal calls of services
# and of the gateway, which may last for days: the payload ingest, the gateway's access log.
PROBES = ("/grpc.health.", "/grpc.reflection.")
INNER = ("/headrace.v1.PayloadIngest/", "/opentelemetry.proto.collector.logs.v1.LogsService/")
UNTOLD = (*PROBES, *INNER)
LINK = "x-headrace-link"  # Metadata: a traceparent that the server's span links to; the gateway removes a stranger's.
OTHER = "_OTHER"
_KNOWN_METHODS = 1024

# Seconds; the conventions' own, and further ones for answers that stream.
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 300)

# By the conventions, a server's span has an error only if the server caused it.
_SERVER_FAULTS = {
    StatusCode.UNKNOWN,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.UNIMPLEMENTED,
    StatusCode.INTERNAL,
    StatusCode.UNAVAILABLE,
    StatusCode.DATA_LOSS,
}

_TRACE_ID = 1  # Of all suppressed calls, and never sampled; the gateway removes it from callers' metadata.
_NOT_SAMPLED = trace.NonRecordingSpan(trace.SpanContext(trace_id=_TRACE_ID, span_id=1, is_remote=False))


@lru_cache(maxsize=_KNOWN_METHODS)
def name_of(method: str) -> str:
    """A method's full name, without the path's first slash; `_OTHER` for one that no service here declares."""
    name = method.lstrip("/")
    try:
        descriptor_pool.Default().FindMethodByName(name.replace("/", "."))
    except KeyError:
        return OTHER
    return name


def attributes_of(name: str) -> dict[str, str]:
    """The attributes of a call that are known before it ends."""
    return {"rpc.system.name": "grpc", "rpc.method": name}


def duration_histogram(meter: Meter | None, name: str) -> Gathered:
    """`rpc.server.call.duration` or `rpc.client.call.duration`."""
    return histogram(meter, name, "s", "How long calls take, to their last message.", DURATION_BUCKETS)


def end_span(span: Span, code: StatusCode, *, is_server: bool, streams: bool) -> None:
    """Ends a call's span with the status that the call had; the end of a stream is also an event."""
    span.set_attribute("rpc.response.status_code", code.name)
    if code is not StatusCode.OK and (code in _SERVER_FAULTS or not is_server):
        _mark(span, code)
    if streams:
        span.add_event("end")
    span.end()


def log_call(
    level: int,
    named: Mapping[str, str],
    code: StatusCode,
    duration_s: float,
    request_id: str,
    span: Span,
    first_message_s: float | None = None,
) -> None:
    """Writes the line of a call that has ended, where lines of its level are written; `named` has its `rpc.method`."""
    if not call_log.writes(level):
        return
    fields: dict[str, str | float] = {
        **named,
        "rpc.response.status_code": code.name,
        "duration_ms": round(1000 * duration_s, 3),
        "request_id": request_id,
        "trace_id": trace_id_of(span),
        "span_id": span_id_of(span),
    }
    if first_message_s is not None:
        fields["first_message_ms"] = round(1000 * first_message_s, 3)
    call_log.write(level, "%s %s in %.1f ms", (named["rpc.method"], code.name, 1000 * duration_s), fields)


def mark_failure(span: Span, code: StatusCode) -> None:
    """Marks a server's span with an error inside of a stream, which the call's own status does not show."""
    if code in _SERVER_FAULTS:
        _mark(span, code)


def _mark(span: Span, code: StatusCode) -> None:
    span.set_attribute("error.type", code.name)
    span.set_status(Status(SpanStatus.ERROR, code.name))


def status_of(code: Any, default: StatusCode = StatusCode.OK) -> StatusCode:
    """The status of a context's `code()`, which is an enum, a number or not set yet."""
    if isinstance(code, StatusCode):
        return code
    if not code:  # What a call that goes well has.
        return default
    for status in StatusCode:
        if status.value[0] == code:
            return default if status is StatusCode.OK else status
    return default


def suppress_tracing() -> None:
    """Calls of this task, and of tasks that it starts, are traced by no hop."""
    context.attach(trace.set_span_in_context(_NOT_SAMPLED))


def is_tracing_suppressed(of: context.Context | None = None) -> bool:
    """Whether tracing is suppressed in a call's context, or in the current one."""
    return trace.get_current_span(of).get_span_context().trace_id == _TRACE_ID
