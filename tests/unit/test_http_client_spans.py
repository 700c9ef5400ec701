"""An HTTP call is one client span and one duration, with its status or its error; a background call is neither."""

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from headrace.telemetry.http import HttpClientSpans
from headrace.telemetry.identity import begin_request
from headrace.telemetry.suppression import suppress_tracing
from tests.support.measured import Measured

TEMPLATE, PATH = "/v2/models/{model}/infer", "/v2/models/m/infer"
KNOWN = {"http.request.method": "POST", "url.template": TEMPLATE, "server.address": "host", "server.port": 80}
DURATION = "http.client.request.duration"


@pytest.fixture
def bench():
    exporter, provider, measured = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False), Measured()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return HttpClientSpans("host:80", provider.get_tracer("test"), measured.meter), exporter, measured


async def test_a_call_has_a_span_a_duration_and_the_callers_trace_headers(bench):
    spans, exporter, measured = bench
    begin_request("mine")
    with spans.call("POST", TEMPLATE, PATH) as call:
        call.status = 200
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == (f"POST {TEMPLATE}", SpanKind.CLIENT, SpanStatus.UNSET)
    ended = KNOWN | {"http.response.status_code": 200}
    assert span.attributes == ended | {"url.full": f"http://host:80{PATH}", "headrace.request_id": "mine"}
    assert measured.count(DURATION, ended) == 1
    assert call.headers["x-request-id"] == "mine"
    assert call.headers["traceparent"].split("-")[1] == f"{span.context.trace_id:032x}"
    assert call.headers["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"


@pytest.mark.parametrize(
    ("status", "error", "error_type"), [(503, ValueError, "503"), (None, asyncio.CancelledError, "CancelledError")]
)
async def test_a_failed_call_is_recorded_with_its_status_or_its_exception(bench, status, error, error_type):
    spans, exporter, measured = bench

    def call():
        with spans.call("POST", TEMPLATE, PATH) as begun:
            begun.status = status
            raise error

    with pytest.raises(error):
        call()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is SpanStatus.ERROR
    assert span.attributes["error.type"] == error_type
    (attributes,) = measured.points(DURATION)
    assert dict(attributes)["error.type"] == error_type


async def test_a_background_call_is_neither_traced_nor_measured(bench):
    spans, exporter, measured = bench

    async def background():
        suppress_tracing()
        with spans.call("GET", TEMPLATE, PATH) as call:
            assert call.headers["traceparent"].endswith("-00")

    await asyncio.create_task(background())
    assert not exporter.get_finished_spans()
    assert measured.names == set()
