"""A replacement for Jaeger where its image is unavailable: takes OTLP on 4317, lists the spans' services on 16686.

`GET /api/services` answers as Jaeger does: {"data": ["envoy-ingress", …]}.
"""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_seen: set[str] = set()


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            _seen.update(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
        return trace_service_pb2.ExportTraceServiceResponse()


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/services" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": sorted(_seen)}).encode())


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Sink(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    page = ThreadingHTTPServer(("0.0.0.0", 16686), Page)
    # In a separate thread: `shutdown` waits for the loop that the signal interrupts.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=page.shutdown).start())
    page.serve_forever()
    server.stop(1).wait()


if __name__ == "__main__":
    main()
