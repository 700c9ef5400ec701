"""Who may call: keys, tokens, web pages, the operator's methods, and what a rate limit service allows.

A page of another origin can send a form or `text/plain` without a preflight request. A page whose host name was pointed
at this machine (DNS rebinding) has the gateway's own origin; only the host name distinguishes it.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import not_
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.errors import OverloadedError, from_rpc_error
from headrace.files import POLL_S
from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from headrace_runner import envoy_config
from headrace_transformer.keys import digests, parse_keys
from tests.process.gateway_before_fakes import (
    HOST,
    METADATA,
    OPENAI,
    ORIGIN,
    V2,
    Answer,
    Gateway,
    raw_request,
    running_gateway,
)
from tests.support.rate_limit_service import RateLimitService
from tests.support.status import code_of, refusal
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish, publish_text, unsigned_token
from tests.waiting import until

GRPC = "application/grpc"
ADMIN, USER, STRANGER, BRIEF = ("hr-" + secrets.token_urlsafe(32) for _ in range(4))
LONGEST = "k" * 512  # Longer than one block of SHA-256.
OPEN_METHOD = "/grpc.health.v1.Health/Check"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write(path: Path, *entries: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(digests(parse_keys(json.dumps(entries))))
    new.replace(path)


@pytest_asyncio.fixture(scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Path]]:
    folder = tmp_path_factory.mktemp("gateway")
    file = folder / "key-digests"
    write(
        file,
        {"name": "root", "key": ADMIN, "role": "admin"},
        {"name": "alice", "key": USER, "models": ["a"], "weight": 2},
        {"name": "long", "key": LONGEST},
        {"name": "brief", "key": BRIEF, "requests_per_second": 3},
    )
    # A key decides, beyond loopback or not.
    environment = {"KEY_DIGESTS": str(file), "PUBLIC_MANAGEMENT": "false"}
    async with running_gateway(folder, environment=environment) as running:
        yield running, file


async def call(
    address: str, method: str, path: str, headers: Mapping[str, str], body: bytes = b"{}"
) -> tuple[int, dict[str, str], bytes]:
    answer = await asyncio.to_thread(raw_request, address, method, path, headers.items(), body)
    return answer.status, answer.headers, answer.body


async def metadata_of(gateway: Gateway, headers: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a call as a service sees it."""
    status, _, body = await call(gateway.address, "POST", OPENAI, {"content-type": "application/json"} | dict(headers))
    assert status == 200, body
    return dict(json.loads(body)["metadata"])


async def grpc_status(address: str, method: str, headers: Mapping[str, str]) -> str:
    _, answer, _ = await call(address, "POST", method, {"content-type": GRPC} | dict(headers), bytes(5))
    return answer.get("grpc-status", "0")


@pytest.mark.parametrize(
    "headers",
    [
        bearer(USER),
        {"authorization": f"bearer {USER}"},
        {"x-api-key": USER},
        {"authorization": "Basic YTpi", "x-api-key": USER},
    ],
)
async def test_a_key_becomes_the_clients_name_and_policy_and_is_not_passed_on(
    keyed: tuple[Gateway, Path], headers: dict[str, str]
) -> None:
    forged = {"x-headrace-client": "root", "x-headrace-policy": '{"role":"admin"}'}
    metadata = await metadata_of(keyed[0], headers | forged)
    assert metadata["x-headrace-client"] == "alice"
    assert json.loads(metadata["x-headrace-policy"]) == {"role": "user", "models": ["a"], "weight": 2}
    assert not metadata.keys() & {"authorization", "x-api-key"}
    assert USER not in str(metadata)


async def test_a_flood_of_a_limited_client_is_refused_by_the_gateway(keyed: tuple[Gateway, Path]) -> None:
    address = keyed[0].address

    async def is_refused() -> bool:
        """Over gRPC and REST; on a busy machine the calls may be too slow for a flood."""
        statuses = await asyncio.gather(*(grpc_status(address, METADATA, bearer(BRIEF)) for _ in range(16)))
        headers = {"content-type": "application/json"} | bearer(BRIEF)
        status, answer, body = await call(address, "POST", OPENAI, headers)
        if set(statuses) != {"0", "8"} or status != 429:
            return False
        assert (answer["retry-after"], answer["x-failed-hop"]) == ("1", "gateway")
        assert b"brief has made more than twice the requests that its key allows in a second" in body
        return True

    await until(is_refused)
    # Calls of others, and calls that need no key, are not counted.
    assert {await grpc_status(address, METADATA, bearer(USER)) for _ in range(16)} == {"0"}
    assert {await grpc_status(address, OPEN_METHOD, bearer(BRIEF)) for _ in range(16)} == {"0"}


async def test_keys_of_every_length_are_accepted(keyed: tuple[Gateway, Path]) -> None:
    keys = [("k" * 15 + str(n % 10) * (n - 15), f"n{n}") for n in (*range(16, 140), 512)]
    keys = [(key, name) for key, name in keys if key != LONGEST]
    gateway, file = keyed
    before = file.read_text()
    try:
        write(file, *({"name": name, "key": key} for key, name in keys))
        await until(lambda: is_known(gateway, keys[0][0]))
        for key, name in keys:
            assert (await metadata_of(gateway, bearer(key)))["x-headrace-client"] == name
    finally:
        file.with_suffix(".new").write_text(before)
        file.with_suffix(".new").replace(file)
        await until(lambda: is_known(gateway, LONGEST))


async def is_known(gateway: Gateway, key: str) -> bool:
    return await grpc_status(gateway.address, METADATA, bearer(key)) != "16"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(STRANGER),
        {"x-api-key": STRANGER},
        bearer(USER[:-1]),
        bearer(USER + "x"),
        bearer("k" * 600),
        {"authorization": USER},
        {"authorization": "Bearer "},
        {"authorization": "Basic YTpi"},
        {"x-headrace-client": "root", "x-headrace-policy": '{"role":"admin"}'},
    ],
)
async def test_without_a_known_key_nothing_is_served(keyed: tuple[Gateway, Path], headers: dict[str, str]) -> None:
    gateway, _ = keyed
    for address in (gateway.address, gateway.management):
        assert await grpc_status(address, METADATA, headers) == "16"
        assert await grpc_status(address, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", headers) == "16"
        assert await grpc_status(address, METADATA, headers | {"host": "predictor"}) == "16"
        assert await grpc_status(address, METADATA, headers | {"content-type": GRPC_WEB}) == "16"
        for path in (OPENAI, "/v2", "/v1/models", "/headrace/v1/payloads", "/nowhere"):
            status, answer, body = await call(address, "GET", path, headers)
            assert (status, answer["x-failed-hop"], answer["www-authenticate"]) == (401, "gateway", "Bearer")
            assert "error" in json.loads(body)
        status, _, body = await call(address, "POST", OPENAI, headers)
        assert json.loads(body)["error"]["type"] == "authentication_error"


async def test_a_changed_file_takes_effect_by_itself_and_a_missing_one_refuses_all(keyed: tuple[Gateway, Path]) -> None:
    gateway, file = keyed
    before = file.read_text()
    assert await is_known(gateway, USER)
    try:
        write(file, {"name": "bob", "key": STRANGER})
        await until(lambda: is_known(gateway, USER), holds=not_)
        assert (await metadata_of(gateway, bearer(STRANGER)))["x-headrace-client"] == "bob"
        file.unlink()
        await until(lambda: grpc_status(gateway.address, METADATA, bearer(STRANGER)), holds="14".__eq__)
        status, _, body = await call(gateway.address, "GET", "/v1/models", bearer(STRANGER))
        assert (status, json.loads(body)["error"]["message"]) == (503, "the transformer has not read the keys yet")
    finally:
        file.with_suffix(".new").write_text(before)
        file.with_suffix(".new").replace(file)
        await until(lambda: is_known(gateway, USER))


def test_changed_files_are_read_every_second() -> None:
    """So a change takes effect within two seconds: docs/security.md."""
    assert POLL_S <= 1
    assert "cache_duration: 1s" in (envoy_config.ENVOY_FOLDER / "envoy.yaml").read_text()


# What a browser sends without an origin; the last by a page that hides what it can.
BROWSER: list[dict[str, str]] = [
    {"user_agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0", "accept_language": "en"},
    {"sec_fetch_mode": "cors"},
    {"sec_fetch_site": "same-origin"},
    {"cookie": "a=b"},
    {"referer": "http://evil.example/"},
    {"user_agent": "curl/8.5.0", "accept_language": ""},
]
GRPC_WEB, REST, FORM = "application/grpc-web+proto", "application/json", "text/plain"
REQUESTS = [(METADATA, GRPC), (METADATA, GRPC_WEB), (OPENAI, REST), (OPENAI, FORM)]


async def call_from(
    gateway: Gateway, path: str, content_type: str, host: str, *origins: str, **others: str
) -> tuple[str, str]:
    """The status of an answer, gRPC's if it has one, and the hop that failed, if any; `others` are headers."""

    fields = [("host", host), ("content-type", content_type), *(("origin", origin) for origin in origins)]
    fields += [(name.replace("_", "-"), value) for name, value in others.items()]
    body = bytes(5) if content_type.startswith(GRPC) else b"{}"
    answer = await asyncio.to_thread(raw_request, gateway.address, "POST", path, fields, body)
    status = answer.grpc_status if content_type.startswith(GRPC) else str(answer.status)
    if not status:  # gRPC's status is in the trailers, which gRPC-Web writes into the body.
        status = "0" if b"grpc-status:0" in answer.body or content_type == GRPC else "?"
    return status, answer.headers.get("x-failed-hop", "")


def refused(content_type: str) -> tuple[str, str]:
    return ("7" if content_type.startswith(GRPC) else "403"), "gateway"


def served(content_type: str) -> tuple[str, str]:
    return ("0" if content_type.startswith(GRPC) else "200"), ""


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_a_page_of_another_origin_is_refused(gateway: Gateway, path: str, content_type: str) -> None:
    port = gateway.address.partition(":")[2]
    others = [
        "http://evil.example",
        "null",
        "",
        f"http://127.0.0.1:{int(port) + 1}",
        "http://127.0.0.1",
        ORIGIN + ".evil",
    ]
    for origin in others:
        assert await call_from(gateway, path, content_type, gateway.address, origin) == refused(content_type), origin
    # The first of two is allowed.
    assert await call_from(gateway, path, content_type, gateway.address, ORIGIN, others[0]) == refused(content_type)


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_the_gateway_s_own_page_and_allowed_ones_are_served(
    gateway: Gateway, path: str, content_type: str
) -> None:
    own = f"http://{gateway.address}"
    for host, origins in (
        (gateway.address, ()),
        (gateway.address, (own,)),
        (gateway.address, (ORIGIN,)),
        (gateway.address, (ORIGIN.upper(),)),
        (HOST, (f"https://{HOST}",)),  # A proxy before the gateway ends TLS.
        (HOST.upper(), (f"https://{HOST}",)),
    ):
        assert await call_from(gateway, path, content_type, host, *origins) == served(content_type), (host, origins)


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_a_host_name_that_may_be_foreign_is_refused_and_others_are_served(
    gateway: Gateway, path: str, content_type: str
) -> None:
    for host in (
        "isvc.ns.example.com",
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.",
        f"{HOST}.evil",
        "1.2.3.4.5",
    ):
        # The page's origin is that of its name, which a browser does not send where the page reads.
        assert await call_from(gateway, path, content_type, host, f"http://{host}") == refused(content_type), host
        for header in BROWSER:
            assert await call_from(gateway, path, content_type, host, **header) == refused(content_type), (host, header)
        # What is no browser calls by any name, as a test of an ingress does.
        assert await call_from(gateway, path, content_type, host, user_agent="curl/8.5.0") == served(content_type), host
    for host in (
        "localhost",
        "localhost:1",
        "a.localhost",
        "host.docker.internal:8080",
        "envoy:8080",
        "[::1]:8080",
        "[::1]",
        "10.0.0.1",
        HOST,
        f"{HOST}:9",
    ):
        assert await call_from(gateway, path, content_type, host, **BROWSER[0]) == served(content_type), host


async def test_reading_calls_are_refused_too_with_advice(gateway: Gateway) -> None:
    for path in ("/", V2, "/headrace/v1/payloads", "/nothing"):
        answer = await gateway.request("GET", path, host="evil.example", user_agent="Mozilla/5.0")
        assert (answer.status, answer.headers["x-failed-hop"]) == (403, "gateway"), path
        assert "GATEWAY_HOSTS" in answer.json["error"]
    page = await gateway.request("POST", OPENAI, b"{}", origin="http://evil.example")
    assert page.json["error"]["type"] == "permission_error"
    assert "GATEWAY_ALLOWED_ORIGINS" in page.json["error"]["message"]


INFERENCE, OPEN_INFERENCE = "/inference.GRPCInferenceService", "/headrace.rest.v1.OpenInference"
METHODS = [
    *(
        f"{INFERENCE}/{name}"
        for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings")
    ),
    *(f"/headrace.v1.PayloadLog/{name}" for name in ("Get", "Query", "Tail", "Delete", "Usage")),
    "/headrace.v1.Development/KillPredictor",
    # The methods behind REST paths, called by gRPC.
    *(
        f"{OPEN_INFERENCE}/{name}"
        for name in ("RepositoryLoad", "RepositoryUnload", "WriteLogSettings", "WriteTraceSetting")
    ),
]
PATHS = [
    ("POST", "/v2/repository/models/a/load"),
    ("POST", "/v2/repository/models/a/unload"),
    ("POST", "/v2/repository/models/a/%6coad"),
    ("POST", "/v2/../v2/repository/models/a/load"),
    ("GET", "/headrace/v1/payloads"),
    ("GET", "/headrace/v1/payloads?model=a"),
    ("GET", "/headrace/v1/payloads/1"),
    ("DELETE", "/headrace/v1/payloads/1"),
    ("GET", "/headrace/v1/payloads:tail"),
    ("GET", "/headrace/v1/usage"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/a/trace/setting"),
]


@pytest_asyncio.fixture(scope="module")
async def beyond_loopback(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway configured as beyond loopback, but on loopback."""
    folder = tmp_path_factory.mktemp("gateway")
    async with running_gateway(folder, environment={"PUBLIC_MANAGEMENT": "false"}) as running:
        yield running


async def status(address: str, method: str, path: str, content_type: str, authority: str = "") -> tuple[str, str]:
    """The status of an answer, gRPC's of a gRPC call, and the hop that failed."""
    headers = {"content-type": content_type} | ({"host": authority} if authority else {})
    code, answer, _ = await call(address, method, path, headers, bytes(5) if content_type == GRPC else b"{}")
    return answer.get("grpc-status", "0") if content_type == GRPC else str(code), answer.get("x-failed-hop", "")


@pytest.mark.parametrize("authority", ["", "predictor", "predictor:8080"])
@pytest.mark.parametrize("path", METHODS)
async def test_methods_are_refused_beyond_loopback_and_nowhere_else(
    beyond_loopback: Gateway, gateway: Gateway, path: str, authority: str
) -> None:
    assert await status(beyond_loopback.address, "POST", path, GRPC, authority) == ("7", "gateway")
    for address in (beyond_loopback.management, gateway.address, gateway.management):
        assert (await status(address, "POST", path, GRPC, authority))[0] != "7", address


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_paths_are_refused_beyond_loopback_and_nowhere_else(
    beyond_loopback: Gateway, gateway: Gateway, method: str, path: str
) -> None:
    refused = await status(beyond_loopback.address, method, path, "application/json")
    assert refused in (("403", "gateway"), ("404", "gateway"))  # 404: the path has no such name.
    for address in (beyond_loopback.management, gateway.address, gateway.management):
        served = await status(address, method, path, "application/json")
        assert served[0] != "403", address
        assert (refused[0] == "404") == (served == ("404", "gateway")), address


async def test_the_refusal_names_the_management_listener(beyond_loopback: Gateway) -> None:
    answer = await beyond_loopback.request("GET", "/headrace/v1/payloads")
    assert "MANAGEMENT_PORT" in answer.json["error"]
    assert answer.headers["x-failed-hop"] == "gateway"


LIMIT = 5
V2_MODEL = "/v2/models/a"


@dataclass
class Shared:
    """Two gateways, of which the second needs the service, and keys of clients that have made no call yet."""

    gateways: tuple[Gateway, Gateway]
    service: RateLimitService
    port: int
    keys: dict[str, str]
    numbers: Any = field(default_factory=count)

    def next_client(self) -> str:
        return f"limited-{next(self.numbers)}"

    async def ask(
        self, client: str, gateway: int = 0, path: str = OPENAI, body: bytes = b"{}", method: str = "POST"
    ) -> Answer:
        headers = {"x_api_key": self.keys[client], "content_type": "application/json"}
        return await self.gateways[gateway].request(method, path, body, **headers)

    async def ask_by_grpc(self, client: str, gateway: int = 0) -> Any:
        async with self.gateways[gateway].channel() as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = inference_pb2.ServerMetadataRequest()
            call = stub.ServerMetadata(request, metadata=tuple(bearer(self.keys[client]).items()))
            await call
            return dict(await call.initial_metadata())


@pytest_asyncio.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    names = ["root", "free", *(f"limited-{number}" for number in range(10))]
    keys = {name: "hr-" + secrets.token_urlsafe(32) for name in names}
    file = tmp_path_factory.mktemp("keys") / "key-digests"
    limits: dict[str, dict[str, object]] = {name: {"requests_per_minute": LIMIT} for name in names[2:]}
    limits |= {"root": {"role": "admin"}, "free": {"tokens_per_minute": 1}}
    write(file, *({"name": name, "key": keys[name]} | limits[name] for name in names))
    service = RateLimitService()
    port = await service.start()

    def gateway(folder: Path, **settings: Any) -> Any:
        settings |= {"gateway_rate_limit_service": f"127.0.0.1:{port}"}
        return running_gateway(folder, environment={"KEY_DIGESTS": str(file)}, **settings)

    folders = (tmp_path_factory.mktemp("open"), tmp_path_factory.mktemp("closed"))
    try:
        async with gateway(folders[0]) as first, gateway(folders[1], gateway_rate_limit_required=True) as second:
            yield Shared((first, second), service, port, keys)
    finally:
        await service.stop()


def counted(gateway: Gateway, outcome: str) -> int:
    """The number of calls with an outcome of the filter, from the page of metrics."""
    with urllib.request.urlopen(f"http://{gateway.inner}/stats/prometheus", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith(f"envoy_cluster_ratelimit_{outcome}{{"))


async def test_the_remaining_limit_is_in_openais_headers_and_the_next_request_is_refused(shared: Shared) -> None:
    client = shared.next_client()
    for remaining in reversed(range(LIMIT)):
        answer = await shared.ask(client)
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-requests"] == str(LIMIT)
        assert answer.headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit" not in answer.headers
    refused = await shared.ask(client)
    assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert refused.json["error"]["message"] == "the client has made the requests that its key allows in a minute"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-failed-hop"] == "gateway"
    assert "x-envoy-ratelimited" not in refused.headers
    of_v2 = await shared.ask(client, path=V2_MODEL, method="GET", body=b"")
    assert (of_v2.status, list(of_v2.json)) == (429, ["error"])
    error = await refusal(shared.ask_by_grpc(client))
    seen = from_rpc_error(error, "gateway")
    assert isinstance(seen, OverloadedError)
    assert 1000 <= (seen.retry_after_ms or 0) <= 60_000
    assert ("x-ratelimit-remaining-requests", "0") in tuple(error.trailing_metadata() or ())


async def test_two_gateways_count_together(shared: Shared) -> None:
    client = shared.next_client()
    statuses = [(await shared.ask(client, gateway=number % 2)).status for number in range(2 * LIMIT)]
    assert statuses == [200] * LIMIT + [429] * LIMIT


async def test_the_services_count_replaces_that_of_a_process(shared: Shared) -> None:
    client = shared.next_client()
    own = b'{"metadata": {"x-ratelimit-limit-requests": 77}}'
    answer = await shared.ask(client, body=own)
    assert answer.headers["x-ratelimit-limit-requests"] == str(LIMIT)
    metadata = await shared.ask_by_grpc(client)
    assert metadata["x-ratelimit-remaining-requests"] == str(LIMIT - 2)
    assert "x-ratelimit-remaining" not in metadata


async def test_the_service_gets_no_requests_of_other_clients(shared: Shared) -> None:
    client, before = shared.next_client(), len(shared.service.requests)
    for other in ("root", "free"):
        answer = await shared.ask(other)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    for path in ("/v2/health/ready", "/health", "/"):
        await shared.gateways[0].request("GET", path, x_api_key=shared.keys[client])
    assert len(shared.service.requests) == before


async def test_a_slow_service_delays_no_call(shared: Shared) -> None:
    client = shared.next_client()
    shared.service.answers.clear()
    try:
        assert (await shared.ask(client)).status == 200
        assert (await shared.ask(client, gateway=1)).status == 503
    finally:
        shared.service.answers.set()


async def test_without_the_service_calls_pass_or_are_refused_as_configured(shared: Shared) -> None:
    client = shared.next_client()
    await shared.service.stop()
    try:
        own = b'{"metadata": {"x-ratelimit-limit-requests": 77}}'
        for _ in range(2 * LIMIT):
            answer = await shared.ask(client, body=own)
            assert (answer.status, answer.headers["x-ratelimit-limit-requests"]) == (200, "77")
        refused = await shared.ask(client, gateway=1)
        assert (refused.status, refused.json["error"]["type"]) == (503, "server_error")
        assert refused.json["error"]["message"] == "the rate limit service does not answer"
        assert refused.headers["x-failed-hop"] == "gateway"
        assert await code_of(shared.ask_by_grpc(client, gateway=1)) is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(counted, shared.gateways[0], "failure_mode_allowed") >= 2 * LIMIT
        assert await asyncio.to_thread(counted, shared.gateways[1], "error") >= 2
        # Clients without limits do not need the service.
        assert (await shared.ask("free", gateway=1)).status == 200
    finally:
        await shared.service.start(shared.port)
    for gateway in (0, 1):
        await until(
            lambda: shared.ask(client, gateway=gateway),  # noqa: B023
            holds=lambda answer: answer.headers.get("x-ratelimit-limit-requests") == str(LIMIT),
        )


LISTENERS = 2  # Each fetches the key set itself.
FIRST, SECOND = SigningKey("first"), SigningKey("second")
REFUSED = {
    "expired": FIRST.token(exp=int(time.time()) - 3600),
    "does not expire": FIRST.token(exp=None),
    "not yet": FIRST.token(nbf=int(time.time()) + 3600),
    "of another audience": FIRST.token(aud="another"),
    "without audience": FIRST.token(aud=None),
    "of another issuer": FIRST.token(iss="https://another.example"),
    "without issuer": FIRST.token(iss=None),
    "signed by another key of that name": SigningKey("first").token(),
    "signed by an unknown key": SECOND.token(),
    "unsigned": unsigned_token(),
    "cut": FIRST.token()[:-10],
    "an API key": "sk-0123456789",
}


@pytest.fixture(scope="module")
def key_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("access") / "jwks.json"
    publish(file, FIRST)
    return file


@pytest_asyncio.fixture(scope="module")
async def token_gateway(tmp_path_factory: pytest.TempPathFactory, key_set: Path) -> AsyncIterator[Gateway]:
    settings = {"gateway_jwks": str(key_set), "gateway_jwt_issuer": ISSUER, "gateway_jwt_audience": AUDIENCE}
    async with running_gateway(tmp_path_factory.mktemp("jwt"), **settings) as running:
        assert await is_known_token(running, FIRST)  # A call that finds no keys yet fetches them itself.
        await until(lambda: has_fetched(running))
        yield running


def has_fetched(token_gateway: Gateway) -> bool:
    """Whether the key set has been fetched independently of calls; only then it is kept."""
    name = "http.ingress.jwt_authn.jwks_fetch_success"
    with urllib.request.urlopen(f"http://{token_gateway.admin}/stats?filter=^{name}$", timeout=60) as stats:
        return int(stats.read().decode().rpartition(":")[2]) > LISTENERS


async def caller(token_gateway: Gateway, **headers: str) -> str | None:
    """The caller's name that a service sees; None if the token_gateway refuses the call as unauthenticated."""
    answer = await token_gateway.request("POST", OPENAI, b"{}", **headers)
    if answer.status == 401:
        assert answer.json["error"]["type"] == "authentication_error"
        return None
    assert answer.status == 200
    return str(answer.json["metadata"]["x-headrace-client"])


async def is_known_token(token_gateway: Gateway, key: SigningKey) -> bool:
    return await caller(token_gateway, authorization=f"Bearer {key.token()}") == "alice"


async def test_a_token_names_the_caller_and_is_not_passed_on(token_gateway: Gateway) -> None:
    token = FIRST.token(aud=["others", AUDIENCE], headrace_role="admin")
    for headers in ({"authorization": f"Bearer {token}"}, {"x_api_key": token}):
        answer = await token_gateway.request("POST", OPENAI, b"{}", **headers)
        assert json.loads(answer.json["metadata"]["x-headrace-policy"])["role"] == "admin"
        assert answer.json["metadata"]["x-headrace-client"] == "alice"
        assert token not in str(answer.json["metadata"])
    async with token_gateway.channel() as channel:
        stub, request = inference_pb2_grpc.GRPCInferenceServiceStub(channel), inference_pb2.ServerMetadataRequest()
        call = stub.ServerMetadata(request, metadata=(("authorization", f"Bearer {token}"),))
        received = (await call).extensions
        assert "x-headrace-client" in received
        assert "authorization" not in received
        expired = (("authorization", f"Bearer {REFUSED['expired']}"),)
        assert await code_of(stub.ServerMetadata(request, metadata=expired)) is grpc.StatusCode.UNAUTHENTICATED
    # Another key beside it does not matter.
    assert await caller(token_gateway, authorization="Bearer sk-1", x_api_key=token) == "alice"
    assert await caller(token_gateway) is None


@pytest.mark.parametrize("kind", REFUSED)
async def test_an_invalid_token_is_refused(token_gateway: Gateway, kind: str) -> None:
    assert await caller(token_gateway, authorization=f"Bearer {REFUSED[kind]}") is None
    assert await caller(token_gateway, x_api_key=REFUSED[kind]) is None


async def test_a_new_key_set_takes_effect_by_itself_and_ends_no_stream(token_gateway: Gateway, key_set: Path) -> None:
    token_gateway.openai.first_chunk_was_read.clear()
    async with token_gateway.channel() as channel:
        stub = headrace_pb2_grpc.TextGenerationStub(channel)
        own = (("authorization", f"Bearer {FIRST.token()}"),)
        streams = [stub.Generate(headrace_pb2.GenerateRequest(), metadata=own) for _ in range(64)]
        for stream in streams:
            assert (await stream.read()).text == "first"
        publish(key_set, SECOND)
        await until(lambda: is_known_token(token_gateway, SECOND))
        assert not await is_known_token(token_gateway, FIRST)
        token_gateway.openai.first_chunk_was_read.set()
        for stream in streams:
            assert (await stream.read()).text == "last"
            assert await stream.code() is grpc.StatusCode.OK
    publish(key_set, FIRST)
    await until(lambda: is_known_token(token_gateway, FIRST))


@pytest.mark.parametrize("text", ['{"keys": []}', '{\n  "keys" : [\n  ]\n}\n'])
async def test_a_key_set_without_keys_makes_every_token_invalid(
    token_gateway: Gateway, key_set: Path, text: str
) -> None:
    complaints = token_gateway.process.log.read_text().count("Jwks async fetching")
    publish_text(key_set, text)
    await until(lambda: is_known_token(token_gateway, FIRST), holds=not_)
    assert token_gateway.process.log.read_text().count("Jwks async fetching") == complaints
    publish(key_set, FIRST)
    await until(lambda: is_known_token(token_gateway, FIRST))


def test_the_placeholder_key_of_an_empty_set_has_no_private_key() -> None:
    """Its x is a hash, so that its private key cannot be known."""
    script = (envoy_config.ENVOY_FOLDER / "key_set.lua").read_text()
    x, y = (
        int.from_bytes(base64.urlsafe_b64decode(value + "=")) for value in re.findall(r'"[xy]":"([\w-]{43})"', script)
    )
    assert x == int.from_bytes(hashlib.sha256(b"headrace: nobody's key 1").digest())
    ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()  # Raises ValueError off the curve.


@pytest.mark.parametrize(
    "text", ["{broken", *(pytest.param(text, marks=pytest.mark.full) for text in ('{"keys": {}}', ""))]
)
async def test_a_malformed_key_set_leaves_the_last_valid_one_and_is_logged(
    token_gateway: Gateway, key_set: Path, text: str
) -> None:
    complaints = token_gateway.process.log.read_text().count("Jwks async fetching")
    publish_text(key_set, text)
    await until(lambda: token_gateway.process.log.read_text().count("Jwks async fetching") >= complaints + 3)
    assert await is_known_token(token_gateway, FIRST)
    publish(key_set, SECOND)
    await until(lambda: is_known_token(token_gateway, SECOND))
    publish(key_set, FIRST)
    await until(lambda: is_known_token(token_gateway, FIRST))


def test_the_key_set_is_readable_only_by_its_owner(token_gateway: Gateway) -> None:
    """It may contain shared secrets."""
    (socket,) = token_gateway.process.log.parent.glob("jwks.sock")
    assert socket.stat().st_mode & 0o777 == 0o600
