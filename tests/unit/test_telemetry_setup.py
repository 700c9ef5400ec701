"""Exporters are OpenTelemetry's own settings alone; one that is not installed is refused in one line."""

import pytest

from headrace.errors import StartupError
from headrace.telemetry.setup import exports

NAMES = (
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
)
ENDPOINT = "http://127.0.0.1:4317"


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, False, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": ENDPOINT}, False, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False, False),
    ],
)
def test_the_environment_chooses_the_exporters(monkeypatch, environment, traces, metrics):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (exports("TRACES"), exports("METRICS")) == (traces, metrics)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_an_exporter_that_is_not_installed_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=f"{name}={value}: must be"):
        exports("TRACES")
