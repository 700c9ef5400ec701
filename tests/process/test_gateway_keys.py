"""Keys at the gateway: valid ones name the client, and some methods are closed to users; before fake services."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from headrace_transformer.keys import digests, parse_keys
from tests.process.gateway_before_fakes import METADATA, OPENAI, Gateway, running_gateway
from tests.waiting import until

GRPC = "application/grpc"
ADMIN, USER, STRANGER, BRIEF = ("hr-" + secrets.token_urlsafe(32) for _ in range(4))
LONGEST = "k" * 512  # Longer than one block of SHA-256.
OPEN_PATHS = ["/", "/playground/main.js", "/v2/health/ready", "/v2/health/live", "/health"]
OPEN_METHODS = ["/grpc.health.v1.Health/Check", "/inference.GRPCInferenceService/ServerReady"]
SETTINGS = [
    "/inference.GRPCInferenceService/RepositoryModelLoad",
    "/inference.GRPCInferenceService/LogSettings",
    "/headrace.v1.Development/KillPredictor",
    "/headrace.rest.v1.OpenInference/RepositoryUnload",
]


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
    def send() -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    return await asyncio.to_thread(send)


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
    assert {await grpc_status(address, OPEN_METHODS[0], bearer(BRIEF)) for _ in range(16)} == {"0"}


async def test_keys_of_every_length_are_accepted(keyed: tuple[Gateway, Path]) -> None:
    keys = [("k" * 15 + str(n % 10) * (n - 15), f"n{n}") for n in (*range(16, 140), 512)]
    keys = [(key, name) for key, name in keys if key != LONGEST]
    gateway, file = keyed
    before = file.read_text()
    try:
        write(file, *({"name": name, "key": key} for key, name in keys))
        await until(lambda: is_known(gateway, keys[0][0]), timeout_s=5)
        for key, name in keys:
            assert (await metadata_of(gateway, bearer(key)))["x-headrace-client"] == name
    finally:
        file.with_suffix(".new").write_text(before)
        file.with_suffix(".new").replace(file)
        await until(lambda: is_known(gateway, LONGEST), timeout_s=5)


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
        for path in (OPENAI, "/v2", "/v1/models", "/headrace/v1/payloads", "/nowhere"):
            status, answer, body = await call(address, "GET", path, headers)
            assert (status, answer["x-failed-hop"], answer["www-authenticate"]) == (401, "gateway", "Bearer")
            assert "error" in json.loads(body)
        status, _, body = await call(address, "POST", OPENAI, headers)
        assert json.loads(body)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("headers", [{}, bearer(STRANGER)])
async def test_probes_and_the_playground_need_no_key(keyed: tuple[Gateway, Path], headers: dict[str, str]) -> None:
    gateway, _ = keyed
    for path in OPEN_PATHS:
        status, _, _ = await call(gateway.address, "GET", path, headers)
        assert status != 401
    for method in OPEN_METHODS:
        assert await grpc_status(gateway.address, method, headers) != "16"


@pytest.mark.parametrize("authority", ["", "predictor"])
async def test_only_an_admin_may_change_settings_at_both_listeners(keyed: tuple[Gateway, Path], authority: str) -> None:
    gateway, _ = keyed
    host = {"host": authority} if authority else {}
    for address in (gateway.address, gateway.management):
        for method in SETTINGS:
            assert await grpc_status(address, method, bearer(USER) | host) == "7"
            assert await grpc_status(address, method, bearer(ADMIN) | host) not in ("7", "16")
        for key, refused in ((USER, True), (ADMIN, False)):
            load = await call(address, "POST", "/v2/repository/models/a/load", bearer(key))
            assert (load[0] == 403) is refused
            # The logger decides what a user may read.
            payloads = await call(address, "GET", "/headrace/v1/payloads", bearer(key))
            assert payloads[0] not in (401, 403)


async def test_a_changed_file_takes_effect_within_two_seconds_and_a_missing_one_refuses_all(
    keyed: tuple[Gateway, Path],
) -> None:
    gateway, file = keyed
    before = file.read_text()
    assert await is_known(gateway, USER)
    try:
        write(file, {"name": "bob", "key": STRANGER})
        changed = time.monotonic()
        while await is_known(gateway, USER):
            assert time.monotonic() - changed < 2
        assert (await metadata_of(gateway, bearer(STRANGER)))["x-headrace-client"] == "bob"
        file.unlink()

        async def is_closed() -> bool:
            return await grpc_status(gateway.address, METADATA, bearer(STRANGER)) == "14"

        await until(is_closed, timeout_s=5)
        status, _, body = await call(gateway.address, "GET", "/v1/models", bearer(STRANGER))
        assert (status, json.loads(body)["error"]["message"]) == (503, "the transformer has not read the keys yet")
    finally:
        file.with_suffix(".new").write_text(before)
        file.with_suffix(".new").replace(file)
        await until(lambda: is_known(gateway, USER), timeout_s=5)
