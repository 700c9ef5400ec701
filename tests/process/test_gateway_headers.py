"""The gateway checks the headers that gRPC and the services parse, of every protocol alike; and the headers of one
call do not affect another call."""

import asyncio
import base64
import http.client
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from opentelemetry.propagate import extract
from opentelemetry.trace import get_current_span

from headrace.clients import caller_of
from headrace.telemetry.rpc import is_tracing_suppressed
from headrace_protos import inference_pb2, inference_pb2_grpc
from headrace_runner import envoy_config
from tests.process.gateway_before_fakes import (
    METADATA,
    OPENAI,
    ORIGIN,
    Answer,
    Gateway,
    Header,
    raw_request,
    running_gateway,
)

TIMEOUTS = ("x-timeout-ms", "x-first-token-timeout-ms")
GRPC, GRPC_WEB = "application/grpc", "application/grpc-web+proto"
NO_TIMEOUTS = (b"abc", b"-1S", b"12345678901S", b"1" * 5000 + b"S", b"", b"5", b"5s", b"S", b"1.5S", b"5S,5S", b"\xff")
NO_MILLISECONDS = (b"0", b"-1", b"1.5", b"1s", b"123456789", b"many", b"")
NO_BASE64 = (b"!!!", b"a", b"AB", b"AAB", b"AA=", b"AAAA=", b"AAAA====", b"AA,AA", b"\xff\xfe")
BASE64 = [base64.b64encode(bytes(range(length))).rstrip(padding) for length in range(5) for padding in (b"", b"=")]


async def call(
    address: str, content_type: str, *headers: Header, host: str = "gateway", path: str = METADATA
) -> Answer:
    """A call with raw headers that no gRPC client sends; the gateway accepts gRPC over HTTP/1.1 too."""
    fields = (("host", host), ("content-type", content_type), ("origin", ORIGIN), *headers)
    return await asyncio.to_thread(raw_request, address, "POST", path, fields, bytes(5))


async def test_a_malformed_deadline_is_refused_by_the_gateway(gateway: Gateway) -> None:
    for value in NO_TIMEOUTS:
        for content_type in (GRPC, GRPC_WEB):
            for host in ("gateway", "predictor"):
                refused = await call(gateway.address, content_type, ("grpc-timeout", value), host=host)
                assert (refused.grpc_status, refused.headers["x-failed-hop"]) == ("3", "gateway"), (value, content_type)
                assert refused.headers["x-http-status"] == "400"
                assert refused.headers["grpc-message"].replace("%20", " ").startswith("grpc-timeout is")
                assert (refused.headers.get("access-control-allow-origin") == ORIGIN) == (host == "gateway")
        refused = await call(gateway.inner, GRPC, ("grpc-timeout", value))
        assert (refused.grpc_status, refused.headers["x-failed-hop"]) == ("3", "gateway"), value
    for value in (b"1H", b"99999999n", b"5S"):
        for address in (gateway.address, gateway.inner):
            assert (await call(address, GRPC, ("grpc-timeout", value))).grpc_status != "3"


async def test_a_tunnel_is_refused_at_once(gateway: Gateway) -> None:
    for content_type in (GRPC, "text/plain"):
        fields = (("host", "gateway:80"), ("content-type", content_type))
        refused = await asyncio.to_thread(raw_request, gateway.address, "CONNECT", "gateway:80", fields, b"")
        assert refused.status == 404


@pytest.mark.parametrize("name", TIMEOUTS)
async def test_a_malformed_timeout_is_refused_of_grpc_as_of_rest(gateway: Gateway, name: str) -> None:
    for value in NO_MILLISECONDS:
        for host in ("gateway", "predictor"):
            refused = await call(gateway.address, GRPC, (name, value), host=host)
            assert (refused.grpc_status, refused.headers["x-failed-hop"]) == ("3", "gateway"), value
        answer = await gateway.request("POST", OPENAI, b"{}", **{name: value.decode()})
        assert (answer.status, answer.headers["x-failed-hop"]) == (400, "gateway"), value
        assert answer.json["error"]["message"].startswith(f"{name} is not")
    assert (await call(gateway.address, GRPC, (name, b"5"), (name, b"5"))).grpc_status == "3"
    assert (await call(gateway.address, GRPC, (name, b"5000"))).grpc_status in ("", "0")


async def test_binary_metadata_must_be_base64(gateway: Gateway) -> None:
    for value in NO_BASE64:
        refused = await call(gateway.address, GRPC, ("x-some-bin", value))
        assert (refused.grpc_status, refused.headers["x-failed-hop"]) == ("3", "gateway"), value
        answer = await gateway.request("POST", OPENAI, b"{}", x_some_bin=value.decode("latin-1"))
        assert (answer.status, answer.headers["x-failed-hop"]) == (400, "gateway"), value
        assert answer.json["error"]["message"] == "x-some-bin is not base64"
    for value in BASE64:
        # A fake that received an unreadable message answers nevertheless.
        assert (await call(gateway.address, GRPC, ("x-some-bin", value))).grpc_status in ("", "0"), value


@pytest.mark.parametrize(
    ("name", "value", "status"), [("grpc-encoding", b"brotli", "12"), ("grpc-previous-rpc-attempts", b"many", "3")]
)
async def test_headers_that_grpc_could_not_parse_are_refused(
    gateway: Gateway, name: str, value: bytes, status: str
) -> None:
    refused = await call(gateway.address, GRPC, (name, value))
    assert (refused.grpc_status, refused.headers["x-failed-hop"]) == (status, "gateway")
    # Such headers of a REST client do not reach the gRPC call that its request becomes.
    assert (await gateway.request("POST", OPENAI, b"{}", **{name: value.decode()})).status == 200


@pytest.mark.parametrize("name", ["te", "grpc-status", "grpc-message", "grpc-retry-pushback-ms", "lb-cost-bin"])
async def test_internal_headers_of_a_caller_reach_no_service(gateway: Gateway, name: str) -> None:
    assert (await call(gateway.address, GRPC, (name, b"AAAA"))).grpc_status in ("", "0")
    assert (await gateway.request("POST", OPENAI, b"{}", **{name: "AAAA"})).status == 200


@pytest.mark.parametrize("size", [17_000, 40_000, 55_000])
async def test_too_many_headers_are_431_and_are_not_tried_again(gateway: Gateway, size: int) -> None:
    for headers in ([("x-a", b"a" * size)], [(f"x-{i}", b"a" * (size // 50)) for i in range(50)]):
        refused = await call(gateway.address, GRPC, *headers)
        assert (refused.grpc_status, refused.headers["x-failed-hop"]) == ("8", "gateway")
        assert refused.headers["x-http-status"] == "431"
        assert "retry-after-ms" not in refused.headers
        answer = await gateway.request("POST", OPENAI, b"{}", **{name: value.decode() for name, value in headers})
        assert (answer.status, answer.headers["x-failed-hop"]) == (431, "gateway")
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert "at most 16384" in answer.json["error"]["message"]


# Worst inputs of each pattern over a caller's bytes: what almost matches, and what matches in many ways.
FILLERS = {
    "x-forwarded-for": (b"1", b"1.", b"a ", b" "),
    "host": (b"1", b":1", b".", b"[1", b".localhost"),
    "origin": (b"https://", b"a"),
    "authorization": (b"Bearer ", b" ", b"a", b"a "),
    "x-api-key": (b"a", b"\xc3"),
    "content-encoding": (b"gzip", b"\xc3"),
    "x-some-bin": (b"A", b"=", b"AB=", b"AQ"),
    "x-timeout-ms": (b"1", b" 1"),
    "grpc-timeout": (b"1", b"1m"),
    "grpc-encoding": (b"gzip,",),
    "content-type": (b"a/", b";"),
    "traceparent": (b"00-", b"0"),
}
SIZES = (1000, 15_000, 55_000)  # The last is more than the gateway reads, and almost more than Envoy takes.
CALLS = 4


@pytest.mark.parametrize("keys", [pytest.param(False, marks=pytest.mark.full), True])
async def test_no_header_costs_the_gateway_more_than_its_length(tmp_path: Path, gateway: Gateway, keys: bool) -> None:
    async with AsyncExitStack() as opened:
        if keys:
            (tmp_path / "digests").write_text(f"{'0' * 64}\tnobody\tuser\t\n")
            environment = {"KEY_DIGESTS": str(tmp_path / "digests")}
            gateway = await opened.enter_async_context(running_gateway(tmp_path, environment=environment))
        envoy = psutil.Process(gateway.process.pid)

        async def cost_s(content_type: str, path: str, name: str, value: bytes) -> float:
            before = sum(envoy.cpu_times()[:2])
            fields = [("content-type", content_type)] * (name != "content-type") + [(name, value)] * (name != "path")
            for _ in range(CALLS):
                with suppress(http.client.HTTPException, ConnectionError):  # Envoy itself refuses some.
                    await asyncio.to_thread(raw_request, gateway.address, "POST", path, fields, bytes(5))
            return (sum(envoy.cpu_times()[:2]) - before) / CALLS

        costs = {}
        for content_type, path in ((GRPC, METADATA), ("application/json", OPENAI)):
            for name, fillers in FILLERS.items():
                for filler in fillers:
                    times = [await cost_s(content_type, path, name, filler * (size // len(filler))) for size in SIZES]
                    costs[content_type, name, filler] = times
            for size in SIZES:
                costs[content_type, "path", size] = [
                    await cost_s(content_type, f"{path}/{'/a' * (size // 2)}", "path", b"")
                ]
    # Fifty times the bytes; with a pattern that backtracks the second takes 0.5 s.
    slow = {what: times for what, times in costs.items() if max(times) > 0.05 + 50 * min(times)}
    assert not slow
    assert max(max(times) for times in costs.values()) < 0.25


@pytest.mark.parametrize("name", ["x-a", "x-request-id", "user-agent", "tracestate"])
async def test_no_service_refuses_headers_that_the_gateway_accepts(gateway: Gateway, name: str) -> None:
    for _ in range(20):  # Between a soft and a hard limit gRPC refuses at random.
        answer = await gateway.request("POST", OPENAI, b"{}", **{name: "a" * 15_000})
        assert answer.status == 200, answer.body


async def test_a_caller_cannot_choose_the_address_by_which_services_identify_it(gateway: Gateway) -> None:
    forged = {"x-forwarded-for": "198.51.100.7", "x-envoy-external-address": "198.51.100.7"}
    callers = set()
    for headers in ({}, forged, {"x-forwarded-for": "198.51.100.7, "}, {"x-headrace-client": "198.51.100.7"}):
        answer = await gateway.request("POST", OPENAI, b"{}", **headers)
        callers.add(caller_of(answer.json["metadata"].items()))
    [caller] = callers  # Envoy has the machine's own address for a caller on loopback.
    assert ip_address(caller) != ip_address("198.51.100.7")


UNTRACED = "00-00000000000000000000000000000001-0000000000000001-00"


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", UNTRACED)],
        [("traceparent", UNTRACED.replace("-00", "-01", 2))],
        [("Traceparent", UNTRACED.upper())],
        [("traceparent", f"{UNTRACED}-more")],
        [("traceparent", f" {UNTRACED} ")],
        [("traceparent", UNTRACED.replace("00-", "cc-", 1))],
        [("traceparent", UNTRACED), ("traceparent", UNTRACED)],
        [("traceparent", "junk"), ("traceparent", UNTRACED)],
        [("traceparent", UNTRACED), ("tracestate", "headrace=1"), ("baggage", "trace_id=1")],
        [("x-caller-traceparent", UNTRACED)],
        [("x-caller-traceparent", UNTRACED), ("traceparent", "junk")],
        [("x-caller-traceparent", UNTRACED), ("x-caller-traceparent", UNTRACED)],
    ],
)
async def test_the_services_internal_trace_header_cannot_be_set_from_outside(
    gateway: Gateway, headers: list[tuple[str, str]]
) -> None:
    answer = await asyncio.to_thread(raw_request, gateway.address, "POST", OPENAI, headers, b"{}")
    received: dict[str, str] = answer.json["metadata"]
    context = extract(received)
    assert get_current_span(context).get_span_context().is_valid
    assert not is_tracing_suppressed(context)


async def test_an_unparsable_header_of_one_call_affects_no_later_one(tmp_path: Path) -> None:
    """The gateway's check is off, as for a request's trailers, which no filter reads."""
    async with running_gateway(tmp_path, without_the_check) as gateway, gateway.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, bad, good in (("grpc-timeout", b"abc", None), ("x-some-bin", b"!!", b"good")):
            assert (await call(gateway.address, GRPC, (name, bad))).grpc_status == "13"
            for _ in range(5):
                metadata = ((name, good),) if good else ()
                await stub.ServerMetadata(inference_pb2.ServerMetadataRequest(), metadata=metadata)


def without_the_check(config: envoy_config.Config) -> None:
    for listener in config["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] != "envoy.filters.http.lua"]


async def test_metadata_that_is_not_text_passes(gateway: Gateway) -> None:
    for name in ("x-a", "x-request-id", "user-agent", "tracestate", "traceparent"):
        assert (await call(gateway.address, GRPC, (name, b"\xff\x80"))).grpc_status in ("", "0")
