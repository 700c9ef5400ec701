"""Keeps what a service asks by itself, every second and for ever, out of the traces."""

from __future__ import annotations

from opentelemetry import context, trace

_NOBODY = 1  # The trace that all of it belongs to, never sampled; the gateway takes it from strangers.
_NOT_SAMPLED = trace.NonRecordingSpan(trace.SpanContext(trace_id=_NOBODY, span_id=1, is_remote=False))


def leave_untraced() -> None:
    """Calls of this task, and of those that it starts, carry the wish not to be traced, which every hop heeds."""
    context.attach(trace.set_span_in_context(_NOT_SAMPLED))


def is_untraced(of: context.Context | None = None) -> bool:
    """Whether a call's context, or the current one, carries that wish."""
    return trace.get_current_span(of).get_span_context().trace_id == _NOBODY
