"""Providers of spans and metrics, by OpenTelemetry's own environment variables.

Every request has a trace id. Spans are exported by OTLP over gRPC if `OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` names a collector; otherwise they have only ids. Metrics are on the
Prometheus page, and exported if there is a collector (`…_METRICS_ENDPOINT`). `OTEL_TRACES_EXPORTER` and
`OTEL_METRICS_EXPORTER` may be `none`, or `otlp` for a collector at the default address.

Exporters run on separate threads with bounded queues: a dead or slow collector loses spans but delays no request;
losses are counted (`otel.sdk.*`).
"""

import os
from collections.abc import Callable
from typing import Any, Literal

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from headrace.errors import StartupError
from headrace.telemetry.gathered import gathered_views

Signal = Literal["TRACES", "METRICS"]

_DEFAULTS = {
    # Without it the SDK counts none of what it loses.
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true",
    # A Prometheus page shows no exemplars, and choosing them costs as much as counting.
    "OTEL_METRICS_EXEMPLAR_FILTER": "always_off",
}
# No proxy that the environment names. The exporters' annotation has text, which gRPC ignores.
_DIRECT: Any = (("grpc.enable_http_proxy", 0),)


def set_up_telemetry(service: str) -> Callable[[], None]:
    """Installs the providers; the returned function flushes and stops them. Raises StartupError."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    exports_traces, exports_metrics = exports("TRACES"), exports("METRICS")
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the name given here.
    attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    resource = Resource.create(attributes)

    readers: list[MetricReader] = [PrometheusMetricReader(scope_info_enabled=False)]
    if exports_metrics:
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(channel_options=_DIRECT)))
    meters = MeterProvider(readers, resource, shutdown_on_exit=False, views=gathered_views())
    metrics.set_meter_provider(meters)

    # Lost spans are counted by the exporter; counting each span at its start and end would cost more than the span.
    # Without a collector none is recorded, which is most of what a span costs.
    sampler = None if exports_traces else ALWAYS_OFF
    tracers = TracerProvider(sampler, resource, shutdown_on_exit=False, meter_provider=NoOpMeterProvider())
    if exports_traces:
        try:
            tracers.add_span_processor(
                BatchSpanProcessor(OTLPSpanExporter(channel_options=_DIRECT), meter_provider=meters)
            )
        except ValueError as error:
            raise StartupError(f"OTEL_BSP_*: {error}") from None
    trace.set_tracer_provider(tracers)

    def shut_down() -> None:
        tracers.shutdown()
        meters.shutdown()

    return shut_down


def exports(signal: Signal) -> bool:
    """Whether the environment has a collector for them; raises StartupError for an exporter that is not here."""
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        raise StartupError(f"OTEL_{signal}_EXPORTER={exporter}: must be otlp or none")
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"):
        if os.environ.get(name, "") not in ("", "grpc"):
            raise StartupError(f"{name}={os.environ[name]}: must be grpc")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return exporter == "otlp" or any(os.environ.get(name) for name in endpoints)
