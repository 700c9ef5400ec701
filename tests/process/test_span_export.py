"""Exported spans equal those of the library's encoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from headrace.telemetry.span_export import SpanExporter, request_of

texts = st.text(st.characters(codec="utf-8"), max_size=8)
integers, floats = st.integers(-(2**70), 2**70), st.floats(allow_nan=False)
values = st.one_of(
    texts, st.booleans(), integers, floats, *map(st.lists, (texts | st.none(), st.booleans(), integers, floats))
)
attributes = st.dictionaries(st.sampled_from("abcdefg"), values)
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(TraceFlags.SAMPLED)),
    st.sampled_from([TraceState(), TraceState([("a", "b"), ("c", "d")])]),
)
times = st.integers(1, 2**63)


@given(st.data())
def test_the_sent_spans_equal_those_of_the_library(data):
    draw = data.draw
    made = InMemorySpanExporter()
    provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=5, max_events=2, max_links=2))
    provider.add_span_processor(SimpleSpanProcessor(made))
    for _ in range(draw(st.integers(1, 4))):
        tracer = provider.get_tracer(draw(st.sampled_from(["headrace", "another"])), draw(st.sampled_from(["", "1"])))
        parent = draw(st.none() | contexts)
        span = tracer.start_span(
            draw(texts),
            None if parent is None else set_span_in_context(NonRecordingSpan(parent)),
            draw(st.sampled_from(SpanKind)),
            draw(attributes),
            [Link(context, draw(attributes)) for context in draw(st.lists(contexts, max_size=3))],
            draw(times),
        )
        for name in draw(st.lists(texts, max_size=3)):
            span.add_event(name, draw(attributes), draw(times))
        status = draw(st.sampled_from(StatusCode))
        span.set_status(Status(status, draw(texts) if status is StatusCode.ERROR else None))
        span.end(draw(times))
    spans = made.get_finished_spans()
    assert request_of(spans) == encode_spans(spans)


def exported(monkeypatch, spans):
    """The requests that the collector gets for ended spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    processor, sent = BatchSpanProcessor(SpanExporter()), []
    monkeypatch.setattr(processor.span_exporter._client, "Export", lambda request, **_: sent.append(request))
    for span in spans:
        processor.on_end(span)
    processor.shutdown()
    return sent


def ended(name="span", **attributes):
    """An ended span with its own provider."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    provider.get_tracer("headrace").start_span(name, attributes=attributes).end()
    [span] = made.get_finished_spans()
    return span


def test_ended_spans_are_sent_in_one_batch(monkeypatch):
    spans = [ended(a="b"), ended(a=1)]
    [request] = exported(monkeypatch, spans)
    assert [[span] for span in request.resource_spans[0].scope_spans[0].spans] == [
        list(encode_spans([span]).resource_spans[0].scope_spans[0].spans) for span in spans
    ]


def test_a_span_that_is_not_sampled_is_not_sent(monkeypatch):
    assert exported(monkeypatch, [ReadableSpan("a", SpanContext(1, 1, False, TraceFlags(TraceFlags.DEFAULT)))]) == []


def test_a_span_that_cannot_be_encoded_is_lost_alone(monkeypatch, caplog):
    [request] = exported(monkeypatch, [ended("\ud800"), ended(a="b")])
    assert [span.name for span in request.resource_spans[0].scope_spans[0].spans] == ["span"]
    assert "a span cannot be encoded" in caplog.text


def test_text_that_is_not_utf_8_loses_only_its_attribute(monkeypatch):
    """As with the library; a caller's metadata cannot contain such text."""
    [request] = exported(monkeypatch, [ended(a="\ud800", b="c")])
    assert [pair.key for pair in request.resource_spans[0].scope_spans[0].spans[0].attributes] == ["b"]
