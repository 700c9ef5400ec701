"""A service that exports no spans makes ids alone, and passes the sampler's decision on."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.span import TraceState

from headrace.telemetry.identity import traceparent_of
from headrace.telemetry.unexported_spans import UnexportedSpans

PARENT = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def started(sampler=DEFAULT_ON, parent=None):
    context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
    return UnexportedSpans(sampler).get_tracer("any").start_span("name", context)


def test_a_span_without_a_parent_begins_a_trace():
    spans = [started(), started()]
    contexts = [span.get_span_context() for span in spans]
    assert all(context.is_valid and not context.is_remote for context in contexts)
    assert len({context.trace_id for context in contexts}) == len({context.span_id for context in contexts}) == 2
    assert not any(span.is_recording() for span in spans)


def test_a_span_belongs_to_its_parents_trace():
    state = TraceState([("vendor", "1")])
    parent = SpanContext(PARENT.trace_id, PARENT.span_id, True, PARENT.trace_flags, state)
    context = started(parent=parent).get_span_context()
    assert (context.trace_id, context.trace_state) == (parent.trace_id, state)
    assert context.span_id != parent.span_id


@pytest.mark.parametrize(
    ("sampler", "parent_flags", "flags"),
    [(DEFAULT_ON, "01", "01"), (DEFAULT_ON, "00", "00"), (DEFAULT_ON, None, "01"), (ALWAYS_OFF, "01", "00")],
)
def test_other_services_get_the_samplers_decision(sampler, parent_flags, flags):
    parent = None
    if parent_flags is not None:
        parent = SpanContext(PARENT.trace_id, PARENT.span_id, True, TraceFlags(int(parent_flags, 16)))
    assert traceparent_of(started(sampler, parent)).endswith(f"-{flags}")


def test_a_current_span_is_current_only_in_its_block():
    provider = UnexportedSpans(DEFAULT_ON)
    with provider.get_tracer("any").start_as_current_span("name") as span:
        assert trace.get_current_span() is span
    assert trace.get_current_span() is not span
