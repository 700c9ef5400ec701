"""The real Envoy with the derived configuration, in front of fake services."""

import asyncio
import gzip
import json
import urllib.request
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from headrace.errors import NotReadyError, from_rpc_error
from headrace.telemetry.identity import REQUEST_ID
from headrace.telemetry.rpc import LINK
from headrace_protos import inference_pb2, inference_pb2_grpc
from headrace_runner import envoy_config
from tests.process.gateway_before_fakes import (
    METADATA,
    OPENAI,
    ORIGIN,
    V2,
    Answer,
    FakeHealth,
    FakeOpenAI,
    Gateway,
    running_gateway,
    start_envoy,
)
from tests.support.free_ports import free_settings
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.status import refusal
from tests.waiting import until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lonely_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Envoy without any service behind it."""
    folder = tmp_path_factory.mktemp("lonely")
    settings = free_settings(folder)
    process = start_envoy(settings, folder)
    inner, admin = (f"127.0.0.1:{port}" for port in (settings.gateway_inner_port, settings.gateway_admin_port))
    management = f"127.0.0.1:{settings.management_port}"
    alone = Gateway(settings.gateway, FakeOpenAI(), inner, OtlpReceiver(), admin, process, FakeHealth(), management)
    async with alone.channel() as channel:
        await channel.channel_ready()
    yield alone
    await process.stop()


@pytest.mark.parametrize(
    ("code", "status", "kind", "word"),
    [
        ("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_argument"),
        ("UNAUTHENTICATED", 401, "authentication_error", "unauthenticated"),
        ("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
        ("RESOURCE_EXHAUSTED", 413, "invalid_request_error", "resource_exhausted"),
        ("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
        ("INTERNAL", 500, "server_error", "internal"),
        ("UNIMPLEMENTED", 501, "server_error", "unimplemented"),
        ("UNAVAILABLE", 502, "server_error", "unavailable"),
        ("UNAVAILABLE", 503, "server_error", "unavailable"),
        ("DEADLINE_EXCEEDED", 504, "server_error", "deadline_exceeded"),
    ],
)
async def test_an_abort_gets_its_status_and_the_api_s_shape(
    gateway: Gateway, code: str, status: int, kind: str, word: str
) -> None:
    message = 'no "a", \\ or é\n'
    signed = {"x-http-status": status, "x-failed-hop": "predictor"}
    answer = await gateway.post(abort=code, message=message, metadata=signed)
    assert answer.status == status
    assert answer.headers["x-failed-hop"] == "predictor"
    assert answer.json == {"error": {"message": message, "type": kind, "code": word, "param": None}}


async def test_an_error_body_of_the_service_is_kept(gateway: Gateway) -> None:
    error = {"error": {"message": "full", "type": "rate_limit_error", "code": "busy", "param": None}}
    metadata = {"x-http-status": 429, "x-failed-hop": "predictor", "retry-after-ms": 1500}
    answer = await gateway.post(metadata=metadata, answer=error)
    assert answer.status == 429
    assert answer.json == error
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["x-failed-hop"] == "predictor"


async def test_rest_clients_see_no_headers_of_grpc(gateway: Gateway) -> None:
    signed = {"x-http-status": 502, "x-failed-hop": "predictor"}
    for answer in (await gateway.post(), await gateway.post(abort="UNAVAILABLE", message="gone", metadata=signed)):
        assert not [name for name in answer.headers if name.startswith(("grpc-", "x-http-status", "x-envoy-"))]


async def test_grpc_clients_see_the_service_s_metadata_untouched(gateway: Gateway) -> None:
    async with gateway.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        failed = await refusal(stub.ModelReady(inference_pb2.ModelReadyRequest()))
    trailing = dict(failed.trailing_metadata() or ())
    assert failed.details() == "full"
    assert {"x-http-status": "429", "x-failed-hop": "predictor", "retry-after-ms": "1500"}.items() <= trailing.items()


async def test_the_timeout_header_sets_the_deadline_a_second_later(gateway: Gateway) -> None:
    timed = await gateway.request("POST", OPENAI, b"{}", x_timeout_ms="30000")
    assert 30 < timed.json["time_remaining"] <= 31
    untimed = await gateway.request("POST", OPENAI, b"{}", grpc_timeout="1S")
    assert untimed.json["time_remaining"] is None


async def test_the_first_token_s_deadline_is_passed_on_and_is_no_deadline_of_the_call(gateway: Gateway) -> None:
    answer = await gateway.request("POST", OPENAI, b"{}", x_first_token_timeout_ms="99999999")
    assert answer.json["metadata"]["x-first-token-timeout-ms"] == "99999999"
    assert answer.json["time_remaining"] is None


async def test_a_request_id_is_generated_or_kept_passed_on_and_returned(gateway: Gateway) -> None:
    kept = await gateway.request("POST", OPENAI, b"{}", x_request_id="mine")
    assert kept.headers["x-request-id"] == kept.json["metadata"]["x-request-id"] == "mine"
    made = await gateway.post()
    assert len(made.headers["x-request-id"]) == 36
    assert made.headers["x-request-id"] == made.json["metadata"]["x-request-id"]


@pytest.mark.parametrize("path", ["/", "/nothing", "/v1/nothing"])
async def test_answers_of_the_gateway_itself_carry_the_request_id(gateway: Gateway, path: str) -> None:
    kept = await gateway.request("GET", path, x_request_id="mine")
    assert kept.headers["x-request-id"] == "mine"
    made = await gateway.request("GET", path)
    assert len(made.headers["x-request-id"]) == 36
    refused = await gateway.request("POST", OPENAI, b"{}", x_request_id="mine", x_timeout_ms="0")
    assert (refused.status, refused.headers["x-request-id"]) == (400, "mine")


def trace_and_span(traceparent: str) -> tuple[str, str]:
    """The trace and span ids of a sampled traceparent."""
    version, trace, span, flags = traceparent.split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")
    return trace, span


async def test_every_answer_names_the_gateway_s_span_in_the_request_s_trace(gateway: Gateway) -> None:
    answers = [
        await gateway.post(metadata={"traceparent": f"00-{TRACE}-{CALLER}-00"}),
        await gateway.post(abort="NOT_FOUND", message="gone"),
        await gateway.request("GET", "/"),
        await gateway.request("GET", "/nothing"),
        await gateway.request("POST", OPENAI, b"{}", x_request_id="mine", x_timeout_ms="0"),
    ]
    for answer in answers:
        trace, span = trace_and_span(answer.headers["traceparent"])
        assert trace == answer.headers["x-trace-id"] != TRACE
        await until(lambda trace=trace, span=span: span in {one.span_id for one in gateway.collector.spans(trace)})


async def test_a_grpc_client_gets_the_trace_s_id_too(gateway: Gateway) -> None:
    async with gateway.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        sampled = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
        answered = stub.ServerMetadata(inference_pb2.ServerMetadataRequest(), metadata=sampled)
        await answered
        failed = stub.ModelReady(inference_pb2.ModelReadyRequest(), metadata=sampled)
        await refusal(failed)
        metadata = (
            *await answered.initial_metadata(),
            *await failed.initial_metadata(),
            *await failed.trailing_metadata(),
        )
    found = [value for key, value in metadata if key == "traceparent"]
    assert [trace_and_span(value)[0] for value in found] == [TRACE, TRACE]


@pytest.mark.parametrize("path", ["/nothing", OPENAI])
async def test_a_caller_s_trace_is_continued_with_its_sampling_flag(gateway: Gateway, path: str) -> None:
    for flag in ("01", "00"):
        answer = await gateway.request("POST", path, b"{}", traceparent=f"00-{TRACE}-{CALLER}-{flag}")
        version, trace, span, flags = answer.headers["traceparent"].split("-")
        assert (version, trace, flags) == ("00", TRACE, flag)
        assert span != CALLER


@pytest.mark.parametrize(
    "traceparent",
    ["junk", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{CALLER}-01"],
)
async def test_a_request_with_a_malformed_traceparent_gets_a_trace(gateway: Gateway, traceparent: str) -> None:
    answer = await gateway.request("POST", OPENAI, b"{}", traceparent=traceparent)
    trace, _ = trace_and_span(answer.headers["traceparent"])
    assert trace == answer.headers["x-trace-id"] == trace_and_span(answer.json["metadata"]["traceparent"])[0]


async def test_every_span_of_the_gateway_carries_the_request_s_id(gateway: Gateway) -> None:
    kept = await gateway.request("POST", OPENAI, b"{}", x_request_id="mine")
    made = await gateway.post()
    unrouted = await gateway.request("GET", "/nothing", x_request_id="mine")
    for answer, name in ((kept, OPENAI), (made, OPENAI), (unrouted, "/nothing")):
        trace, request_id = answer.headers["x-trace-id"], answer.headers["x-request-id"]
        wanted = {("envoy-ingress", name, request_id)}
        await until(lambda trace=trace, wanted=wanted: spans_of(gateway, trace) == wanted)


async def test_the_inner_listener_passes_the_request_s_id_on_and_samples_only_by_the_flag(gateway: Gateway) -> None:
    # The second has the 15th digit of a gateway's own id for a call that is not sampled.
    ids = {"1" * 32: "mine", "2" * 32: "6b3d2d5a-0c1e-4b7a-9d57-3a1f7e0c9b11"}
    async with grpc.aio.insecure_channel(gateway.inner) as channel:
        for flag, traces in (("00", ["3" * 32]), ("01", [*ids])):
            for trace in traces:
                metadata = (
                    ("x-request-id", ids.get(trace, "untraced")),
                    ("traceparent", f"00-{trace}-{CALLER}-{flag}"),
                )
                await channel.unary_unary(METADATA)(b"", metadata=metadata)
    for trace, request_id in ids.items():
        names = {METADATA, f"predictor {METADATA}"}
        wanted = {("envoy-inner", name, request_id) for name in names}
        await until(lambda trace=trace, wanted=wanted: spans_of(gateway, trace) == wanted)
    assert not spans_of(gateway, "3" * 32)


def spans_of(gateway: Gateway, trace: str) -> set[tuple[str, str, str]]:
    return {(one.service, one.name, one.attributes.get(REQUEST_ID, "")) for one in gateway.collector.spans(trace)}


async def test_a_client_cannot_change_retries_or_timeouts(gateway: Gateway) -> None:
    answer = await gateway.request("POST", OPENAI, b"{}", x_envoy_upstream_rq_timeout_ms="1", x_envoy_force_trace="1")
    assert answer.status == 200
    assert "x-envoy-force-trace" not in answer.json["metadata"]


async def test_a_client_cannot_send_the_transformers_metadata(gateway: Gateway) -> None:
    inner = {"x-headrace-recorded": "true", LINK: "00", "x-headrace-joins-answers": "true"}
    answer = await gateway.request("POST", OPENAI, b"{}", **inner)
    assert answer.status == 200
    assert not inner.keys() & answer.json["metadata"].keys()
    for authority in (None, "predictor"):
        async with gateway.channel(authority) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = (*inner.items(), ("x-other", "true"))
            server = await stub.ServerMetadata(inference_pb2.ServerMetadataRequest(), metadata=metadata)
        assert "x-other" in server.extensions
        assert not inner.keys() & set(server.extensions)


@pytest.mark.parametrize(
    ("authority", "expected"),
    [(None, "transformer"), ("predictor", "predictor"), ("predictor:8080", "predictor"), ("localhost", "transformer")],
)
async def test_the_authority_chooses_the_predictor(gateway: Gateway, authority: str | None, expected: str) -> None:
    async with gateway.channel(authority) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ServerMetadata(inference_pb2.ServerMetadataRequest())
    assert answer.name == expected


async def test_a_stream_that_no_service_has_begun_is_retried(gateway: Gateway) -> None:
    for refused in ("drains", "stops"):
        assert await stream_one(gateway, refused) == [refused]
    failed = await refusal(stream_one(gateway, "dies"))
    assert failed.details() == "the engine died"


async def stream_one(gateway: Gateway, request_id: str) -> list[str]:
    """Ids of the answers to one request to the predictor."""

    async def requests() -> AsyncIterator[inference_pb2.ModelInferRequest]:
        yield inference_pb2.ModelInferRequest(id=request_id)

    async with gateway.channel("predictor") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        return [answer.infer_response.id async for answer in stub.ModelStreamInfer(requests())]


async def test_all_calls_of_a_dead_predictor_are_retried_and_errors_of_requests_eject_none(tmp_path: Path) -> None:
    count = 600

    async def ejections(gateway: Gateway) -> int:
        name = "cluster.predictor.outlier_detection.ejections_enforced_total"
        page = f"http://{gateway.admin}/stats?filter={name}"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(page, timeout=60).read().decode())
        return int(text.removeprefix(f"{name}: "))

    async with (
        running_gateway(tmp_path, with_rare_health_checks, predictors=2) as gateway,
        gateway.channel("predictor") as channel,
    ):
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for status in ("INTERNAL", "DEADLINE_EXCEEDED", "UNKNOWN") * 10:
            failed = await refusal(stub.ModelMetadata(inference_pb2.ModelMetadataRequest(name=status)))
            assert failed.code().name == status
        assert await ejections(gateway) == 0
        request = inference_pb2.ModelMetadataRequest(name="waits")
        calls = asyncio.gather(*(stub.ModelMetadata(request) for _ in range(count)))
        (dying, server), (other, _) = gateway.predictors
        await until(lambda: dying.held + other.held == count)
        assert min(dying.held, other.held) > count / 4
        other.release.set()
        await server.stop(0)
        await calls
        assert other.held == count
        # The next ones that it would get cannot connect.
        await asyncio.gather(*(stub.ModelMetadata(request) for _ in range(count)))
        await until(lambda: ejections(gateway))  # Envoy's main thread counts it, after the worker has answered.


@pytest.mark.parametrize(("authority", "hop"), [(None, "transformer"), ("predictor", "predictor")])
async def test_an_absent_hop_is_named_to_grpc_clients(lonely_gateway: Gateway, authority: str | None, hop: str) -> None:
    async with lonely_gateway.channel(authority) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        failed = await refusal(stub.ServerMetadata(inference_pb2.ServerMetadataRequest()))
    error = from_rpc_error(failed, "gateway")
    assert error.hop == hop
    # Before and after a failed health check a call reaches no service.
    assert isinstance(error, NotReadyError)
    assert error.message == f"no {hop} is ready"


async def test_an_absent_hop_is_named_to_rest_clients(lonely_gateway: Gateway) -> None:
    openai = await lonely_gateway.post()
    assert openai.status == 503
    assert openai.json["error"]["message"] == "no transformer is ready"
    assert openai.headers["x-failed-hop"] == "transformer"
    assert openai.json["error"]["type"] == "server_error"
    v2 = await lonely_gateway.request("GET", V2)
    assert v2.headers["x-failed-hop"] == "transformer"
    assert isinstance(v2.json["error"], str)


async def test_gzip_is_accepted_and_other_codings_are_refused(gateway: Gateway) -> None:
    body = json.dumps({"answer": {"read": True}}).encode()
    assert (await gateway.request("POST", OPENAI, gzip.compress(body), content_encoding="gzip")).json == {"read": True}
    refused = await gateway.request("POST", OPENAI, zlib.compress(body), content_encoding="deflate")
    assert (refused.status, refused.headers["x-failed-hop"]) == (400, "gateway")
    assert "content-encoding" in refused.json["error"]["message"]


async def test_a_page_of_an_allowed_origin_may_call(gateway: Gateway) -> None:
    for path in (OPENAI, V2, "/headrace/v1/generate", "/inference.GRPCInferenceService/ModelInfer"):
        headers = {"origin": ORIGIN, "access_control_request_method": "POST", "access_control_request_headers": "x-a"}
        preflight = await gateway.request("OPTIONS", path, **headers)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert preflight.headers["access-control-allow-headers"].startswith("*")
    for answer in (
        await gateway.request("POST", OPENAI, b"{}", origin=ORIGIN),
        await gateway.request("POST", OPENAI, b"{}", origin=ORIGIN, x_timeout_ms="0"),
        await gateway.request("GET", V2, origin=ORIGIN),
        await gateway.request("GET", "/nothing", origin=ORIGIN),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    ("name", "kind"), [("", "html"), ("playground/main.js", "javascript"), ("playground/style.css", "css")]
)
async def test_the_page_is_served_and_may_run_only_its_own_scripts(gateway: Gateway, name: str, kind: str) -> None:
    answer = await gateway.request("GET", f"/{name}")
    assert answer.status == 200
    assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
    assert answer.body == (envoy_config.ENVOY_FOLDER / "playground" / (Path(name).name or "index.html")).read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    if not name:
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert (await gateway.request("POST", f"/{name}")).status == 404


@pytest.mark.parametrize("path", ["/headrace/v1/development/kill", "/headrace.v1.Development/KillPredictor"])
async def test_no_page_of_another_origin_may_kill(gateway: Gateway, path: str) -> None:
    headers = {"origin": ORIGIN, "access_control_request_method": "POST"}
    preflight = await gateway.request(
        "OPTIONS", path, **headers, access_control_request_headers="x-headrace-development"
    )
    assert preflight.status == 404
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("method", ["/headrace.v1.PredictorDevelopment/Kill", "/headrace.v1.Development/KillPredictor"])
async def test_a_predictor_cannot_be_killed_from_outside(gateway: Gateway, method: str) -> None:
    async with gateway.channel("predictor") as channel:
        failed = await refusal(channel.unary_unary(method)(b""))
    assert dict(failed.trailing_metadata() or ())["x-failed-hop"] == "gateway"


async def test_grpc_web_passes_and_fails_as_grpc(gateway: Gateway) -> None:
    async def call(method: str, message: bytes) -> tuple[Answer, dict[str, str]]:
        frame = bytes(1) + len(message).to_bytes(4, "big") + message
        answer = await gateway.request("POST", method, frame, content_type="application/grpc-web+proto")
        assert answer.headers["content-type"].startswith("application/grpc-web")
        trailers = answer.body[answer.body.find(b"\x80") + 5 :].decode() if b"\x80" in answer.body else ""
        return answer, answer.headers | dict(line.split(":", 1) for line in trailers.split("\r\n") if line)

    service = "/inference.GRPCInferenceService"
    answer, metadata = await call(f"{service}/ServerMetadata", b"")
    assert metadata["grpc-status"] == "0"
    assert b"transformer" in answer.body
    _, metadata = await call(f"{service}/ModelReady", b"")
    assert (metadata["grpc-status"], metadata["x-failed-hop"], metadata["retry-after-ms"]) == ("8", "predictor", "1500")
    _, metadata = await call("/unknown.Service/Method", b"")
    assert (metadata["grpc-status"], metadata["x-failed-hop"]) == ("12", "gateway")


async def test_a_busy_service_does_not_count_as_dead_and_a_draining_one_gets_no_calls(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, with_a_tenth_of_the_limits) as gateway:
        gateway.health.answers.clear()
        checks = gateway.health.checks
        await until(lambda: gateway.health.checks > checks)
        busy_until = asyncio.get_running_loop().time() + 1  # With the shortened limits this is ten seconds.
        while asyncio.get_running_loop().time() < busy_until:
            assert (await gateway.post()).status == 200
        gateway.health.answers.set()
        await gateway.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await until(gateway.post, holds=lambda answer: answer.status == 503)


INTERVALS = ("interval", "unhealthy_interval", "no_traffic_interval", "no_traffic_healthy_interval")


def with_rare_health_checks(config: envoy_config.Config) -> None:
    """A dead predictor is then found by its calls alone: a host that a health check has found gets no call, so that
    none ejects it."""
    for cluster in config["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", ()):
            check |= dict.fromkeys(INTERVALS, "600s")


def with_a_tenth_of_the_limits(config: envoy_config.Config) -> None:
    for cluster in config["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", ()):
            check["timeout"] = f"{float(check['timeout'].removesuffix('s')) / 10}s"
            check |= dict.fromkeys(INTERVALS, "0.1s")
