"""One trace from the gateway to the predictor, seen by a real OTLP receiver."""

import asyncio

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.system.calls import generate, rest
from tests.waiting import until

METHOD = "inference.GRPCInferenceService/ModelStreamInfer"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []  # Service name, span.

    async def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[tuple[str, object]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]


async def test_one_trace_joins_the_caller_envoy_transformer_and_predictor_until_the_collector_dies(new_stack):
    servicer, collector = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, collector)
    endpoint = f"http://127.0.0.1:{collector.add_insecure_port('127.0.0.1:0')}"
    await collector.start()
    exporting = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    stack = await new_stack(
        models="storyteller=models/storyteller",
        otel_exporter_otlp_endpoint=endpoint,
        environment={"transformer": exporting, "predictor": exporting},
    )
    traceparent = f"00-{TRACE}-{CALLER}-01"
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 4}
    assert (await rest(stack.gateway, "POST", "/v1/completions", body, traceparent=traceparent)).status == 200

    def chain():
        """The spans from the predictor's up to the caller's, as (service, name, kind)."""
        spans = {span.span_id.hex(): (service, span) for service, span in servicer.of(TRACE)}
        at = next((key for key, (s, span) in spans.items() if s == "millrace-predictor" and span.name == METHOD), None)
        links = []
        while at in spans:
            service, span = spans[at]
            links.append(service)
            at = span.parent_span_id.hex()
        return links if at == CALLER else None

    await until(chain)
    services = chain()
    assert services[0] == "millrace-predictor"
    assert [name for i, name in enumerate(services) if i == 0 or services[i - 1] != name] == [
        "millrace-predictor",
        "envoy-inner",
        "millrace-transformer",
        "envoy-ingress",
    ]

    # A dead collector costs nothing.
    await collector.stop(None)
    calls = (generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=4) for _ in range(20))
    assert all(await asyncio.gather(*calls))
