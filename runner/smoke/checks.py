"""The checks of any model: which ones there are for its kind, and those of the server and its repository."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2
from runner.smoke.facts import Kind, ModelFacts
from runner.smoke.gateway import TIMEOUT_S, Gateway, expect, refused_call

# What the table says of a check that passed; Failed and grpc's and httpx's errors say that it did not.
Run = Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    protocol: str
    name: str
    run: Run


def of_any_model(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    """The server, the model's own pages, and what nobody may be answered."""
    yield from _of_the_server(gateway)
    yield from _of_the_model(gateway, model)
    nobody = pb.ModelInferRequest(model_name="no-such-model")
    asked = millrace_pb2.GenerateRequest(model="no-such-model", prompt="x")
    yield Check(
        "gRPC",
        "ModelInfer of no model",
        lambda: refused_call(gateway.inference.ModelInfer(nobody, timeout=TIMEOUT_S), 404),
    )
    yield Check(
        "gRPC", "Generate of no model", lambda: refused_call(gateway.text.Generate(asked, timeout=TIMEOUT_S), 404)
    )
    for path, body in (
        ("/v1/completions", {"model": "no-such-model", "prompt": "x"}),
        ("/v2/models/no-such-model/infer", {"inputs": []}),
        ("/v2/no/such/path", {}),
        ("/v1/no-such-path", {}),
    ):
        yield Check("REST", f"POST {path}", partial(gateway.refused, path, body, 404))


def _of_the_server(gateway: Gateway) -> Iterator[Check]:
    async def health() -> str:
        for name in ("", "ready"):
            answer = await gateway.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            expect(answer.status == health_pb2.HealthCheckResponse.SERVING, f"health of {name!r} is {answer.status}")
        return "SERVING"

    async def reflection() -> str:
        async def asked() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        stub: Any = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)  # type: ignore[arg-type]
        names = [
            service.name
            async for answer in stub.ServerReflectionInfo(asked(), timeout=TIMEOUT_S)
            for service in answer.list_services_response.service
        ]
        for name in ("inference.GRPCInferenceService", "millrace.v1.TextGeneration", "millrace.v1.PayloadLog"):
            expect(name in names, f"{name} is not listed")
        return f"{len(names)} services"

    async def server() -> str:
        expect((await gateway.inference.ServerLive(pb.ServerLiveRequest(), timeout=TIMEOUT_S)).live, "not live")
        expect((await gateway.inference.ServerReady(pb.ServerReadyRequest(), timeout=TIMEOUT_S)).ready, "not ready")
        told = await gateway.inference.ServerMetadata(pb.ServerMetadataRequest(), timeout=TIMEOUT_S)
        return f"{told.name} {told.version}"

    yield Check("gRPC", "Health/Check", health)
    yield Check("gRPC", "ServerReflection", reflection)
    yield Check("gRPC", "ServerLive, ServerReady, ServerMetadata", server)
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/health", "/version", "/v1/models", "/"):
        yield Check("REST", f"GET {path}", partial(_gets, gateway, path))


def _of_the_model(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    name = model.name

    async def ready(stub: Any) -> str:
        asked = pb.ModelReadyRequest(name=name, version=model.version)
        expect((await stub.ModelReady(asked, timeout=TIMEOUT_S)).ready, "not ready")
        return "ready"

    async def about(stub: Any) -> str:
        told = await stub.ModelMetadata(pb.ModelMetadataRequest(name=name), timeout=TIMEOUT_S)
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=TIMEOUT_S)).config
        expect(told.name == config.name == name, f"metadata of {told.name!r}, configuration of {config.name!r}")
        return f"{len(told.inputs)} inputs, {len(told.outputs)} outputs"

    async def statistics() -> str:
        asked = pb.ModelStatisticsRequest(name=name)
        answer = await gateway.inference.ModelStatistics(asked, timeout=TIMEOUT_S)
        expect([told.name for told in answer.model_stats] == [name], "statistics of other models")
        return f"{answer.model_stats[0].inference_count} inferences"

    async def index() -> str:
        answer = await gateway.inference.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        states = {told.name: told.state for told in answer.models}
        expect(states.get(name) == "READY", f"its state is {states.get(name)}")
        return f"{len(states)} models"

    async def version() -> str:
        asked = pb.ModelMetadataRequest(name=name, version="no-such-version")
        return await refused_call(gateway.inference.ModelMetadata(asked, timeout=TIMEOUT_S), 404)

    stubs = {"gRPC": gateway.inference}
    if model.kind is not Kind.PROCESSOR:  # Which the predictor does not know.
        stubs["predictor"] = gateway.predictor
    for protocol, stub in stubs.items():
        yield Check(protocol, "ModelReady", partial(ready, stub))
        yield Check(protocol, "ModelMetadata, ModelConfig", partial(about, stub))
    yield Check("gRPC", "ModelStatistics", statistics)
    yield Check("gRPC", "RepositoryIndex", index)
    yield Check("gRPC", "ModelMetadata of no version", version)
    own = f"/v2/models/{name}"
    for path in (own, f"{own}/ready", f"{own}/config", f"{own}/stats", f"{own}/versions/{model.version}"):
        yield Check("REST", f"GET {path}", partial(_gets, gateway, path))
    yield Check("REST", "POST /v2/repository/index", partial(_posts, gateway, "/v2/repository/index", {}))


async def _gets(gateway: Gateway, path: str) -> str:
    answer = await gateway.get(path)
    expect("x-request-id" in answer.headers, "no x-request-id")
    return f"{len(answer.content)} bytes"


async def _posts(gateway: Gateway, path: str, body: Any) -> str:
    return f"{len((await gateway.post(path, body)).content)} bytes"
