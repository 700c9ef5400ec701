"""Spans of a service that exports none: the ids that log lines, payload records and other services have, and no more.

A span of OpenTelemetry's SDK keeps attributes, events and times for an exporter, which is most of what it costs. The
sampler's decision goes on to other services as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    TracerProvider,
    get_current_span,
    use_span,
)


class UnexportedSpans(TracerProvider):
    """Provides tracers whose spans have ids alone; `sampler` is the SDK's, by OpenTelemetry's own variables."""

    def __init__(self, sampler: Sampler, ids: IdGenerator | None = None) -> None:
        self.sampler = sampler
        self._tracer = _UnexportedTracer(sampler, ids or RandomIdGenerator())

    def get_tracer(self, *_: Any, **__: Any) -> Tracer:
        """The one tracer: its spans do not name it."""
        return self._tracer


class _UnexportedTracer(Tracer):
    def __init__(self, sampler: Sampler, ids: IdGenerator) -> None:
        self._sampler = sampler
        self._ids = ids

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        *_: Any,
        **__: Any,
    ) -> Span:
        parent = get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(context, trace_id, name, kind, attributes, links)
        flags = TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
        span_id = self._ids.generate_span_id()
        return NonRecordingSpan(SpanContext(trace_id, span_id, False, TraceFlags(flags), sampled.trace_state))

    @contextmanager
    def start_as_current_span(self, name: str, *arguments: Any, **named: Any) -> Iterator[Span]:  # type: ignore[override]  # The library's own decorator has no types.
        with use_span(self.start_span(name, *arguments, **named)) as span:
            yield span
