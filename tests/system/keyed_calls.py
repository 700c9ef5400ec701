"""Calls of every kind by clients with keys, over gRPC and REST, with TLS or without."""

import asyncio
import ssl
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace_protos import headrace_pb2, inference_pb2
from headrace_protos.headrace_pb2_grpc import PayloadLogStub, TextGenerationStub
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.connections import context
from tests.system.calls import TIMEOUT_S, Answer, each, http_request, text_request
from tests.system.keyed_stack import MODEL, OK, REST, Headers, last_of, status_of

UNAUTHENTICATED, PERMISSION_DENIED, NOT_FOUND = "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"
HTTP_STATUSES = {OK: 200, UNAUTHENTICATED: 401, PERMISSION_DENIED: 403, NOT_FOUND: 404}


class Needs(Enum):
    """The permission that a call needs."""

    NOTHING = "nothing"
    KEY = "any key"
    MODEL = "a key that allows MODEL"
    OWNER = "the key of the record's client, or an admin's"
    ADMIN = "an admin's key"


@dataclass(frozen=True)
class Port:
    """A port of the gateway; `certificates` is the folder of its certificate, None without TLS."""

    address: str
    certificates: Path | None = None

    def channel(self) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.certificates is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        credentials = grpc.ssl_channel_credentials((self.certificates / "authority.crt").read_bytes())
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    async def http(self, method: str, path: str, body: Any, headers: Headers) -> Answer:
        """An answer over HTTP/1.1."""
        tls: ssl.SSLContext | None = None if self.certificates is None else context(self.certificates)
        return await asyncio.to_thread(http_request, self.address, method, path, body, dict(headers), tls=tls)


@dataclass(frozen=True)
class Call:
    """The permission that a call needs, and the call; `status` returns its gRPC status by name, or its HTTP status."""

    needs: Needs
    status: Callable[[], Awaitable[str | int]]


Calls = Mapping[str, Call]
_GENERATION = headrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=2)
_LOAD = inference_pb2.RepositoryModelLoadRequest(model_name="acme/normalizer")
_QUERY = headrace_pb2.QueryPayloadsRequest(page_size=1)


def by_grpc(channel: grpc.aio.Channel, headers: Headers, record_id: str) -> Calls:
    """Each kind of call over gRPC; `record_id` is that of a record in the payload log."""
    oip, text, log = (stub(channel) for stub in (GRPCInferenceServiceStub, TextGenerationStub, PayloadLogStub))
    health, reflection = health_pb2_grpc.HealthStub(channel), reflection_pb2_grpc.ServerReflectionStub(channel)
    options: dict[str, Any] = {"metadata": tuple(headers.items()), "timeout": TIMEOUT_S}
    # With this header an error of one request becomes the status of the stream.
    in_status = options | {"metadata": (*headers.items(), ("triton_grpc_error", "true"))}
    request = text_request(MODEL, "Once", max_tokens=2)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    index, settings = inference_pb2.RepositoryIndexRequest(), inference_pb2.LogSettingsRequest()
    record, none = headrace_pb2.GetPayloadRequest(record_id=record_id), str(uuid.uuid4())

    def call(needs: Needs, begin: Callable[[], Awaitable[Any]]) -> Call:
        return Call(needs, partial(status_of, begin))

    def stream(needs: Needs, begin: Callable[[], Any]) -> Call:
        return Call(needs, partial(status_of, lambda: last_of(begin())))

    return {
        "unary": call(Needs.MODEL, lambda: oip.ModelInfer(request, **options)),
        "stream": stream(Needs.MODEL, lambda: text.Generate(_GENERATION, **options)),
        "both ways": stream(Needs.MODEL, lambda: oip.ModelStreamInfer(each(request), **in_status)),
        "health": call(Needs.NOTHING, lambda: health.Check(health_pb2.HealthCheckRequest(), **options)),
        "server": call(Needs.NOTHING, lambda: oip.ServerReady(inference_pb2.ServerReadyRequest(), **options)),
        "reflection": stream(Needs.KEY, lambda: reflection.ServerReflectionInfo(each(listing), **options)),
        "index": call(Needs.KEY, lambda: oip.RepositoryIndex(index, **options)),
        "payloads": stream(Needs.KEY, lambda: log.Query(_QUERY, **options)),
        "record": call(Needs.OWNER, lambda: log.Get(record, **options)),
        "delete": call(Needs.KEY, lambda: log.Delete(headrace_pb2.DeletePayloadsRequest(record_id=none), **options)),
        "load": call(Needs.ADMIN, lambda: oip.RepositoryModelLoad(_LOAD, **options)),
        "log settings": call(Needs.ADMIN, lambda: oip.LogSettings(settings, **options)),
    }


_REST_NEEDS = {
    Needs.NOTHING: ("ready", "live", "health", "playground", "script"),
    Needs.KEY: ("models", "predictors", "index", "payloads", "delete", "usage"),
    Needs.MODEL: ("completion", "events", "infer", "generate", "lines"),
    Needs.OWNER: ("record",),
    Needs.ADMIN: ("load", "log settings"),
}


def by_rest(port: Port, headers: Headers, record_id: str) -> Calls:
    """The same over REST, including server-sent events and the playground's page."""
    opened = {"live": "/v2/health/live", "health": "/health", "script": "/playground/main.js"}
    sent: dict[str, tuple[str, str, Any]] = {name: ("GET", path, None) for name, path in opened.items()}
    sent |= REST | {
        "index": ("POST", "/v2/repository/index", {}),
        "record": ("GET", f"/headrace/v1/payloads/{record_id}", None),
        "delete": ("DELETE", f"/headrace/v1/payloads/{uuid.uuid4()}", None),
        "usage": ("GET", "/headrace/v1/usage?group=client", None),
    }

    async def status(method: str, path: str, body: Any) -> int:
        answer = await port.http(method, path, body, headers)
        return int(answer.status)

    needs = {name: need for need, names in _REST_NEEDS.items() for name in names}
    return {name: Call(needs[name], partial(status, *request)) for name, request in sent.items()}


async def statuses(calls: Calls) -> dict[str, str | int]:
    """The status of each call; all are made at once."""
    return dict(zip(calls, await asyncio.gather(*(call.status() for call in calls.values())), strict=True))
