"""A collector for tests: receives spans and metrics over OTLP/gRPC, on its own threads.

    with OtlpReceiver() as receiver:
        ...  # export to receiver.endpoint
        receiver.spans(trace_id)

It keeps every span and the newest point of each metric series.
"""

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """An event of a span."""

    name: str


@dataclass(frozen=True)
class Link:
    """A linked span; ids in hexadecimal."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Span:
    """Ids in hexadecimal, `parent_id` "" at the root; kind and status with OpenTelemetry's names: SERVER, ERROR."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: str = "UNSET"
    attributes: Attributes = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric in one export of one process; for a histogram its sum and count."""

    service: str
    instance: str
    name: str
    attributes: Attributes
    time_ns: int
    value: float
    count: int | None = None

    @property
    def series(self) -> Hashable:
        """Identifies its series."""
        return self.instance, self.name, frozenset(self.attributes.items())


class OtlpReceiver:
    """See the module; a context manager; thread-safe.

    `headers` are those of the last export of spans; one is refused with the status `refuse` while there is one.
    """

    def __init__(self, port: int = 0) -> None:
        self.headers: dict[str, str | bytes] = {}
        self.refuse: grpc.StatusCode | None = None
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._points: dict[Hashable, MetricPoint] = {}
        self._server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="otlp-receiver"))
        traces, metrics = trace_grpc.TraceServiceServicer(), metrics_grpc.MetricsServiceServicer()
        traces.Export, metrics.Export = self._take_spans, self._take_metrics
        trace_grpc.add_TraceServiceServicer_to_server(traces, self._server)  # type: ignore[no-untyped-call]
        metrics_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def spans(self, trace_id: str) -> list[Span]:
        """The spans that belong or link to a trace, in order of arrival."""
        with self._lock:
            return [span for span in self._spans if trace_id in _traces(span)]

    def all_spans(self) -> list[Span]:
        """Every span, in order of arrival."""
        with self._lock:
            return list(self._spans)

    def metric_points(self) -> list[MetricPoint]:
        """The newest point of each series."""
        with self._lock:
            return list(self._points.values())

    def _take_spans(
        self, request: trace_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ExportTraceServiceResponse:
        self.headers = dict(context.invocation_metadata())
        if self.refuse:
            context.abort(self.refuse, "as asked")
        spans = list(spans_of(request))
        with self._lock:
            self._spans += spans
        return trace_pb2.ExportTraceServiceResponse()

    def _take_metrics(
        self, request: metrics_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.ExportMetricsServiceResponse:
        points = list(_points(request))
        with self._lock:
            self._points |= {point.series: point for point in points}
        return metrics_pb2.ExportMetricsServiceResponse()


def spans_of(request: trace_pb2.ExportTraceServiceRequest) -> Iterator[Span]:
    """The spans of one export."""
    for resource in request.resource_spans:
        service = str(attributes_of(resource.resource.attributes).get("service.name", ""))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(service, span)


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes of any OTLP message as plain values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _span(service: str, span: SpanMessage) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        attributes=attributes_of(span.attributes),
        events=tuple(Event(event.name) for event in span.events),
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)


def _traces(span: Span) -> set[str]:
    return {span.trace_id, *(link.trace_id for link in span.links)}


def _points(request: metrics_pb2.ExportMetricsServiceRequest) -> Iterator[MetricPoint]:
    for resource in request.resource_metrics:
        attributes = attributes_of(resource.resource.attributes)
        service, instance = str(attributes.get("service.name", "")), str(attributes.get("service.instance.id", ""))
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, metric.WhichOneof("data") or "gauge").data_points:
                    single = hasattr(point, "as_double")  # Otherwise it is a histogram.
                    yield MetricPoint(
                        service,
                        instance,
                        metric.name,
                        attributes_of(point.attributes),
                        point.time_unix_nano,
                        float(getattr(point, point.WhichOneof("value") or "as_double") if single else point.sum),
                        None if single else point.count,
                    )
