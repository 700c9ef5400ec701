"""No traceparent hides a call: on any way in, the service counts it and logs it."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_runner.stack import Stack
from tests.metrics_pages import read_page
from tests.system.calls import http_request
from tests.system.request_outcome import in_thread
from tests.waiting import until

CRAFTED = (
    "00-00000000000000000000000000000001-0000000000000001-00",  # That of the services' background calls.
    "00-00000000000000000000000000000001-0000000000000001-01",
    "00-00000000000000000000000000000002-0000000000000002-00",  # That of a container's health check: not sampled.
    "00-00000000000000000000000000000000-0000000000000000-00",
    "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-00",
    "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
    "junk",
)
NAMES = ("traceparent", "x-caller-traceparent")
BESIDE = {"tracestate": "headrace=1", "baggage": "trace_id=1"}
GRPC = "/inference.GRPCInferenceService/ServerMetadata"
EMPTY = bytes(5)  # A message without fields, in gRPC's framing.
# The service, the method that it counts, and the request of each way in.
WAYS = {
    "gRPC": ("transformer", GRPC, ("POST", GRPC, EMPTY, {"content-type": "application/grpc", "te": "trailers"})),
    "gRPC, the predictor": (
        "predictor",
        GRPC,
        ("POST", GRPC, EMPTY, {"content-type": "application/grpc", "te": "trailers", "host": "predictor"}),
    ),
    "gRPC-Web": ("transformer", GRPC, ("POST", GRPC, EMPTY, {"content-type": "application/grpc-web+proto"})),
    "REST": ("transformer", "/headrace.rest.v1.OpenInference/ServerMetadata", ("GET", "/v2", None, {})),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_crafted_traceparent_hides_no_call(stack: Stack, way: str) -> None:
    service, path, (verb, target, body, headers) = WAYS[way]
    method = path.lstrip("/")
    before = await in_thread(seen, stack, service, method)
    for name in NAMES:
        for value in CRAFTED:
            answer = await in_thread(
                *(http_request, stack.gateway, verb, target, body, headers | BESIDE | {name: value})
            )
            assert answer.status == 200
            assert answer.headers.get("grpc-status", "0") == "0"
    begun = len(NAMES) * len(CRAFTED)
    wanted = {kind: before[kind] + begun for kind in ("counted", "lines")}

    async def all_are_seen() -> bool:
        return await in_thread(seen, stack, service, method) == wanted

    await until(all_are_seen)


def seen(stack: Stack, service: str, method: str) -> Counter[str]:
    """Calls of a method on the service's pages of metrics, and its lines in the log."""
    found: Counter[str] = Counter(counted=0, lines=0)
    for _, port, path in stack.metrics_pages[service]:
        for sample in read_page(port, path):
            if sample.name == "rpc_server_call_duration_seconds_count" and sample.labels["rpc_method"] == method:
                found["counted"] += int(sample.value)
    for name in stack.names:
        if name.partition("-")[0] == service:
            found["lines"] += stack.log(name).count(f'"rpc.method": "{method}"')
    return found
