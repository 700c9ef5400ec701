"""The receiver of the tests keeps the exports of OpenTelemetry's SDK, and that of the benchmarks counts them."""

from __future__ import annotations

import math
import os
import subprocess
import sys

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanKind, StatusCode

from bench.otlp_receiver import receiver_process
from tests.support.otlp_receiver import Event, Link, OtlpReceiver, Span


def export_one_trace(endpoint: str) -> Span:
    """Exports a span with all fields by OpenTelemetry's SDK; returns the span that the receiver must keep."""
    provider = TracerProvider(resource=Resource({"service.name": "exporting"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint, insecure=True)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("above", kind=SpanKind.CLIENT) as above:
        link = SdkLink(above.get_span_context(), {"why": "resumed"})
        below = tracer.start_span(
            "below", kind=SpanKind.SERVER, links=[link], start_time=5, attributes={"n": 1, "ids": [1, 2], "x": 0.5}
        )
        below.add_event("queued", {"is": True}, timestamp=7)
        below.set_status(StatusCode.ERROR)
        below.end(9)
    provider.shutdown()
    context, parent = below.get_span_context(), above.get_span_context()
    trace_id = f"{context.trace_id:032x}"
    return Span(
        service="exporting",
        name="below",
        kind="SERVER",
        trace_id=trace_id,
        span_id=f"{context.span_id:016x}",
        parent_id=f"{parent.span_id:016x}",
        start_ns=5,
        end_ns=9,
        status="ERROR",
        attributes={"n": 1, "ids": [1, 2], "x": 0.5},
        events=(Event("queued", 7, {"is": True}),),
        links=(Link(trace_id, f"{parent.span_id:016x}", {"why": "resumed"}),),
    )


def test_the_receiver_keeps_the_exports_of_the_sdk() -> None:
    with OtlpReceiver() as receiver:
        exported = export_one_trace(receiver.endpoint)
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(receiver.endpoint, insecure=True), math.inf)
        meters = MeterProvider([reader], Resource({"service.name": "exporting"}), shutdown_on_exit=False)
        meter = meters.get_meter("test")
        meter.create_counter("requests", "{request}").add(3, {"way": "grpc"})
        histogram = meter.create_histogram("took", "s")
        histogram.record(0.5)
        histogram.record(1.5)
        meters.force_flush()
        meters.shutdown()
        assert exported in receiver.spans(exported.trace_id)
        assert receiver.spans("0" * 32) == []
        points = {point.name: point for point in receiver.metric_points()}
    assert (points["requests"].value, points["requests"].unit, points["requests"].attributes) == (
        3,
        "{request}",
        {"way": "grpc"},
    )
    assert (points["took"].value, points["took"].count, points["took"].service) == (2.0, 2, "exporting")


def test_a_receiver_in_its_own_process_counts() -> None:
    with receiver_process() as receiver:
        export_one_trace(receiver.endpoint)
        assert receiver.span_count() == 2


def test_a_service_exports_past_the_proxy_of_its_environment() -> None:
    source = """from headrace.telemetry.setup import set_up_telemetry
from opentelemetry import trace
flush = set_up_telemetry("exporting")
span = trace.get_tracer("test").start_span("one")
span.end()
flush()
print(f"{span.get_span_context().trace_id:032x}")"""
    with OtlpReceiver() as receiver:
        proxy = {"http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        environment = {**os.environ, **proxy, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        command = (sys.executable, "-c", source)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [span.name for span in receiver.spans(ended.stdout.strip())] == ["one"]
