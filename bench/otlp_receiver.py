"""A collector that counts spans, in its own process so that it does not load the measured event loop.

with receiver_process() as receiver:
    ...  # export to receiver.endpoint
    receiver.span_count()
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

_TIMEOUT_S = 20.0


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
    process = context.Process(target=_count, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ReceiverProcess(process, ours)
    finally:
        process.kill()
        process.join()


def _count(connection: Connection) -> None:
    span_count = 0

    def take_spans(request: trace_pb2.ExportTraceServiceRequest, _: object) -> trace_pb2.ExportTraceServiceResponse:
        nonlocal span_count
        span_count += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_pb2.ExportTraceServiceResponse()

    def take_metrics(_: object, __: object) -> metrics_pb2.ExportMetricsServiceResponse:
        return metrics_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))  # One thread, so that no count is lost.
    traces, metrics = trace_grpc.TraceServiceServicer(), metrics_grpc.MetricsServiceServicer()
    traces.Export, metrics.Export = take_spans, take_metrics
    trace_grpc.add_TraceServiceServicer_to_server(traces, server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(metrics, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection.send(f"http://127.0.0.1:{port}")
    while True:
        connection.recv()  # EOFError if the parent has ended.
        connection.send(span_count)
