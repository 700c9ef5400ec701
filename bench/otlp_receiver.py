"""A collector to measure and to record with: takes spans and metrics by OTLP over gRPC.

In this process, on threads of its own:

    with OtlpReceiver() as receiver:
        ...  # export to receiver.endpoint
        receiver.spans(trace_id)

In a process of its own, so that it costs the measured event loop nothing:

    async with receiver_process(sink=True) as receiver:
        ...  # export to receiver.endpoint
        await receiver.counts()

The newest spans and the newest point of each metric series are kept; with `sink` they are counted alone.

`python -m bench.otlp_receiver` runs that process: its first line is {"endpoint": …}, then each line of its input,
`counts` or `spans TRACE_ID`, is answered by one line of JSON, until its input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from bench.spans import Attributes, Span, attributes_of, span_count, spans_of

_ROOT = Path(__file__).resolve().parent.parent
_KEPT = 100_000
_LINE_BYTES = 64 << 20
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric of one export of one process; of a histogram the sum, and how many values it is of."""

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
        """What it is a point of."""
        return self.instance, self.name, frozenset(self.attributes.items())


@dataclass(frozen=True)
class Counts:
    """What has come in since the start."""

    exports: int
    spans: int
    metric_points: int


class OtlpReceiver:
    """See the module; a context manager. Its methods may be called by any thread."""

    def __init__(self, port: int = 0, *, sink: bool = False, kept: int = _KEPT) -> None:
        """`kept`: so many spans, the newest, and as many series at most."""
        self._sink = sink
        self._lock = threading.Lock()
        self._counts = Counts(0, 0, 0)
        self._spans: deque[Span] = deque(maxlen=kept)
        self._points: dict[Hashable, MetricPoint] = {}
        self._kept = kept
        self._server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="otlp-receiver"))
        trace_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)  # type: ignore[no-untyped-call]
        metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """All that are kept, in the order in which they came; of one trace those that belong or link to it."""
        with self._lock:
            spans = list(self._spans)
        return [span for span in spans if trace_id is None or trace_id in _traces(span)]

    def metric_points(self) -> list[MetricPoint]:
        """The newest of each series."""
        with self._lock:
            return list(self._points.values())

    def take_spans(self, request: trace_pb2.ExportTraceServiceRequest) -> None:
        spans = [] if self._sink else list(spans_of(request))
        self._take(spans, [], span_count(request), 0)

    def take_metrics(self, request: metrics_pb2.ExportMetricsServiceRequest) -> None:
        points = list(_points(request))
        self._take([], [] if self._sink else points, 0, len(points))

    def _take(self, spans: list[Span], points: list[MetricPoint], span_count: int, point_count: int) -> None:
        with self._lock:
            self._spans.extend(spans)
            for point in points:
                if point.series in self._points or len(self._points) < self._kept:
                    self._points[point.series] = point
            before = self._counts
            self._counts = Counts(before.exports + 1, before.spans + span_count, before.metric_points + point_count)


class ReceiverProcess:
    """A receiver in another process, as the one that started it sees it."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.process = process
        self.endpoint = endpoint

    async def counts(self) -> Counts:
        return Counts(**await self._ask("counts"))

    async def spans(self, trace_id: str) -> list[Span]:
        """Those kept that belong or link to the trace."""
        return [Span.from_json(told) for told in await self._ask(f"spans {trace_id}")]

    async def _ask(self, question: str) -> Any:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the receiver has no pipes")
        self.process.stdin.write(f"{question}\n".encode())
        async with asyncio.timeout(_TIMEOUT_S):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver has ended")
        return json.loads(line)


@asynccontextmanager
async def receiver_process(*, sink: bool = False) -> AsyncIterator[ReceiverProcess]:
    """A receiver in a process of its own, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.otlp_receiver", *(("--sink",) if sink else ())),
        cwd=_ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the receiver has no pipes")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver did not start")
        yield ReceiverProcess(process, json.loads(line)["endpoint"])
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802
        self, request: trace_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ExportTraceServiceResponse:
        self._receiver.take_spans(request)
        return trace_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802
        self, request: metrics_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.ExportMetricsServiceResponse:
        self._receiver.take_metrics(request)
        return metrics_pb2.ExportMetricsServiceResponse()


def _traces(span: Span) -> set[str]:
    return {span.trace_id, *(link.trace_id for link in span.links)}


def _points(request: metrics_pb2.ExportMetricsServiceRequest) -> Iterator[MetricPoint]:
    for resource in request.resource_metrics:
        told = attributes_of(resource.resource.attributes)
        service, instance = str(told.get("service.name", "")), str(told.get("service.instance.id", ""))
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, metric.WhichOneof("data") or "gauge").data_points:
                    single = hasattr(point, "as_double")  # Else it is a histogram.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="on loopback; 0 takes a free one")
    parser.add_argument("--sink", action="store_true", help="count and keep nothing")
    arguments = parser.parse_args()
    with OtlpReceiver(arguments.port, sink=arguments.sink) as receiver:
        print(json.dumps({"endpoint": receiver.endpoint}), flush=True)
        for line in sys.stdin:
            question, _, trace_id = line.strip().partition(" ")
            told = (
                [span.as_json() for span in receiver.spans(trace_id or None)]
                if question == "spans"
                else asdict(receiver.counts())
            )
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
