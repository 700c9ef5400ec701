"""A collector for measurements: receives spans and metrics over OTLP/gRPC.

In this process, on its own threads, it keeps every span and the newest point of each metric series:

    with OtlpReceiver() as receiver:
        ...  # export to receiver.endpoint
        receiver.spans(trace_id)

In its own process, so that it does not load the measured event loop, it only counts spans:

    with receiver_process() as receiver:
        ...  # export to receiver.endpoint
        receiver.span_count()
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from bench.spans import Attributes, Span, attributes_of, span_count, spans_of

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric in one export of one process; for a histogram its sum and count."""

    service: str
    instance: str
    name: str
    unit: str
    attributes: Attributes
    time_ns: int
    value: float
    count: int | None = None

    @property
    def series(self) -> Hashable:
        """Identifies its series."""
        return self.instance, self.name, frozenset(self.attributes.items())


class OtlpReceiver:
    """See the module; a context manager; thread-safe."""

    def __init__(self, *, counts_alone: bool = False) -> None:
        self._counts_alone = counts_alone
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._points: dict[Hashable, MetricPoint] = {}
        self.span_count = 0
        self._server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="otlp-receiver"))
        traces, metrics = trace_grpc.TraceServiceServicer(), metrics_grpc.MetricsServiceServicer()
        traces.Export, metrics.Export = self._take_spans, self._take_metrics
        trace_grpc.add_TraceServiceServicer_to_server(traces, self._server)  # type: ignore[no-untyped-call]
        metrics_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def spans(self, trace_id: str) -> list[Span]:
        """The spans that belong or link to a trace, in order of arrival."""
        with self._lock:
            return [span for span in self._spans if trace_id in _traces(span)]

    def metric_points(self) -> list[MetricPoint]:
        """The newest point of each series."""
        with self._lock:
            return list(self._points.values())

    def _take_spans(
        self, request: trace_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ExportTraceServiceResponse:
        spans = [] if self._counts_alone else list(spans_of(request))
        with self._lock:
            self._spans += spans
            self.span_count += span_count(request)
        return trace_pb2.ExportTraceServiceResponse()

    def _take_metrics(
        self, request: metrics_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.ExportMetricsServiceResponse:
        points = [] if self._counts_alone else list(_points(request))
        with self._lock:
            self._points |= {point.series: point for point in points}
        return metrics_pb2.ExportMetricsServiceResponse()


class ReceiverProcess:
    """A receiver in another process, from the view of its parent."""

    def __init__(self, process: SpawnProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection
        self.endpoint: str = self._received()

    def span_count(self) -> int:
        self._connection.send(None)
        return int(self._received())

    def _received(self) -> str:
        if not self._connection.poll(_TIMEOUT_S):
            raise RuntimeError("the receiver does not answer")
        return str(self._connection.recv())


@contextmanager
def receiver_process() -> Iterator[ReceiverProcess]:
    """A receiver in its own process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ReceiverProcess(process, ours)
    finally:
        process.kill()
        process.join()


def _answer(connection: Connection) -> None:
    with OtlpReceiver(counts_alone=True) as receiver:
        connection.send(receiver.endpoint)
        while True:
            connection.recv()  # EOFError if the parent has ended.
            connection.send(receiver.span_count)


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
                        metric.unit,
                        attributes_of(point.attributes),
                        point.time_unix_nano,
                        float(getattr(point, point.WhichOneof("value") or "as_double") if single else point.sum),
                        None if single else point.count,
                    )
