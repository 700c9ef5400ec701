"""Keeps the background calls of a service, such as probes every second, out of the traces."""

from __future__ import annotations

from opentelemetry import context, trace

_TRACE_ID = 1  # Of all suppressed calls, and never sampled; the gateway removes it from callers' metadata.
_NOT_SAMPLED = trace.NonRecordingSpan(trace.SpanContext(trace_id=_TRACE_ID, span_id=1, is_remote=False))


def suppress_tracing() -> None:
    """Calls of this task, and of tasks that it starts, are traced by no hop."""
    context.attach(trace.set_span_in_context(_NOT_SAMPLED))


def is_tracing_suppressed(of: context.Context | None = None) -> bool:
    """Whether tracing is suppressed in a call's context, or in the current one."""
    return trace.get_current_span(of).get_span_context().trace_id == _TRACE_ID
