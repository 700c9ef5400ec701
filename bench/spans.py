"""A span from OTLP. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """An event of a span."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A linked span; ids in hexadecimal."""

    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)


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

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """The spans of one export."""
    for resource in request.resource_spans:
        service = str(attributes_of(resource.resource.attributes).get("service.name", ""))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(service, span)


def span_count(request: ExportTraceServiceRequest) -> int:
    """The number of spans in an export."""
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


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
        events=tuple(Event(event.name, event.time_unix_nano, attributes_of(event.attributes)) for event in span.events),
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex(), attributes_of(link.attributes)) for link in span.links
        ),
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
