"""Tracer set-up by OpenTelemetry's own environment variables.

Spans are made always, so that every request has a trace id; they are exported by OTLP over gRPC
only where `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` names a collector.
The exporter runs on its own thread with a bounded queue: a dead or slow collector costs spans, not
requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def set_up_tracing(service: str) -> Callable[[], None]:
    """Installs the tracer provider; the returned function flushes and stops it."""
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the name given here.
    attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    if exports_spans():
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def exports_spans() -> bool:
    """Whether the environment names a collector."""
    return any(os.environ.get(name) for name in _ENDPOINTS)


def current_span_id() -> str:
    """The current span's id in hexadecimal, or "" outside of a trace."""
    span = trace.get_current_span().get_span_context()
    return trace.format_span_id(span.span_id) if span.is_valid else ""


def current_trace_id() -> str:
    """The current trace id in hexadecimal, or "" outside of a trace."""
    span = trace.get_current_span().get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid else ""
