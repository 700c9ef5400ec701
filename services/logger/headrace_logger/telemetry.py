"""The logger's telemetry: a span for each commit, and the number of committed records.

A span `payload commit` has a trace of its own, because a commit serves many requests, and links to the span that
answered each of them: the record's trace_id and span_id, if it has both. A span has at most 128 links, so a larger
commit has several spans, in one trace and with the same times; the first is the parent of the others. The attribute
`headrace.records` of each is its number of records. Spans are created only if they are exported.

`Commits.observe` runs on the thread that commits, and takes a few microseconds for each record.
"""

import time
from collections.abc import Callable, Sequence

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import NoOpTracer, SpanContext, SpanKind, Status, StatusCode, Tracer

from headrace.telemetry.setup import exports
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord

RECORDS = "headrace.records"
MAX_LINKS = 128

_TRACE_ID_DIGITS, _SPAN_ID_DIGITS = 32, 16


class Commits:
    """Counts commits and creates their spans; without `tracer`, if the environment configures an exporter."""

    def __init__(self, tracer: Tracer | None = None, meter: Meter | None = None) -> None:
        self._tracer = tracer or (trace.get_tracer("headrace") if exports("TRACES") else NoOpTracer())
        self._traces = not isinstance(self._tracer, NoOpTracer)
        self._committed = (meter or metrics.get_meter("headrace")).create_counter(
            "headrace.payload.committed", "{record}", "Records of the services that were committed, each once."
        )
        self._lost_databases = (meter or metrics.get_meter("headrace")).create_counter(
            "headrace.payload.lost_databases", "{database}", "Databases that were removed while the logger ran."
        )
        self._committed.add(0)  # So that the counter is exported from the start.
        self._lost_databases.add(0)

    def observe(
        self, requests: Sequence[AppendRequest], commit: Callable[[], Sequence[AppendRequest]]
    ) -> Sequence[AppendRequest]:
        """Runs `commit` and returns its result, the requests whose records are new; the span records its error."""
        began_ns = time.time_ns()
        try:
            new = commit()
        except Exception as error:
            self._record_commit(requests, began_ns, error)
            raise
        self._committed.add(len(new))
        self._record_commit(new, began_ns)
        return new

    def count_lost_database(self) -> None:
        """Counts a database that was removed, with every record in it."""
        self._lost_databases.add(1)

    def _record_commit(self, requests: Sequence[AppendRequest], began_ns: int, error: Exception | None = None) -> None:
        if not self._traces:
            return
        ended_ns = time.time_ns()
        parent = Context()  # A new trace.
        for first in range(0, len(requests), MAX_LINKS):
            some = requests[first : first + MAX_LINKS]
            span = self._tracer.start_span("payload commit", parent, SpanKind.CONSUMER, start_time=began_ns)
            if not span.is_recording():
                return
            span.set_attribute(RECORDS, len(some))
            for request in some:
                if (answering := _answering(request.record)) is not None:
                    span.add_link(answering)
            if error is not None:
                # Without the message, which may contain text of a record.
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
            span.end(ended_ns)
            if first == 0:
                parent = trace.set_span_in_context(span, parent)


def _answering(record: PayloadRecord) -> SpanContext | None:
    """The span that answered a record's request, if the record names one."""
    trace_id, span_id = record.trace_id, record.span_id
    if len(trace_id) != _TRACE_ID_DIGITS or len(span_id) != _SPAN_ID_DIGITS:
        return None
    try:
        context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True)
    except ValueError:
        return None
    return context if context.is_valid else None
