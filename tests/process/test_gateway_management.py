"""Loading, unloading, reading the payload log and changing settings: with a public listener on loopback open to all of
the machine, beyond loopback only at the management listener, by whichever name of the method.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.process.gateway_before_fakes import METADATA, OPENAI, V2, Gateway, running_gateway

GRPC = "application/grpc"
INFERENCE, REST = "/inference.GRPCInferenceService", "/headrace.rest.v1.OpenInference"
METHODS = [
    *(
        f"{INFERENCE}/{name}"
        for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings")
    ),
    *(f"/headrace.v1.PayloadLog/{name}" for name in ("Get", "Query", "Tail", "Delete", "Usage")),
    "/headrace.v1.Development/KillPredictor",
    # The methods behind REST paths, called by gRPC.
    *(f"{REST}/{name}" for name in ("RepositoryLoad", "RepositoryUnload", "WriteLogSettings", "WriteTraceSetting")),
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


@pytest_asyncio.fixture(scope="module")
async def on_loopback(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


async def status(address: str, method: str, path: str, content_type: str, authority: str = "") -> tuple[str, str]:
    """The status of an answer, gRPC's of a gRPC call, and the hop that failed."""

    def send() -> tuple[str, str]:
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            headers = {"content-type": content_type} | ({"host": authority} if authority else {})
            connection.request(method, path, bytes(5) if content_type == GRPC else b"{}", headers)
            response = connection.getresponse()
            response.read()
            code = response.getheader("grpc-status") if content_type == GRPC else str(response.status)
            return code or "0", response.getheader("x-failed-hop") or ""
        finally:
            connection.close()

    return await asyncio.to_thread(send)


@pytest.mark.parametrize("authority", ["", "predictor", "predictor:8080"])
@pytest.mark.parametrize("path", METHODS)
async def test_methods_are_refused_beyond_loopback_and_nowhere_else(
    beyond_loopback: Gateway, on_loopback: Gateway, path: str, authority: str
) -> None:
    assert await status(beyond_loopback.address, "POST", path, GRPC, authority) == ("7", "gateway")
    for address in (beyond_loopback.management, on_loopback.address, on_loopback.management):
        assert (await status(address, "POST", path, GRPC, authority))[0] != "7", address


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_paths_are_refused_beyond_loopback_and_nowhere_else(
    beyond_loopback: Gateway, on_loopback: Gateway, method: str, path: str
) -> None:
    refused = await status(beyond_loopback.address, method, path, "application/json")
    assert refused in (("403", "gateway"), ("404", "gateway"))  # 404: the path has no such name.
    for address in (beyond_loopback.management, on_loopback.address, on_loopback.management):
        served = await status(address, method, path, "application/json")
        assert served[0] != "403", address
        assert (refused[0] == "404") == (served == ("404", "gateway")), address


async def test_the_refusal_names_the_management_listener(beyond_loopback: Gateway) -> None:
    answer = await beyond_loopback.request("GET", "/headrace/v1/payloads")
    assert "MANAGEMENT_PORT" in answer.json["error"]
    assert answer.headers["x-failed-hop"] == "gateway"


async def test_calls_of_models_are_served_on_both_listeners(beyond_loopback: Gateway) -> None:
    for address in (beyond_loopback.address, beyond_loopback.management):
        assert await status(address, "POST", OPENAI, "application/json") == ("200", "")
        assert await status(address, "POST", METADATA, GRPC) == ("0", "")
        assert await status(address, "GET", V2, "application/json") == ("503", "predictor")
        assert (await status(address, "GET", "/", "text/plain"))[0] == "200"
        assert (await status(address, "POST", "/v2/repository/index", "application/json"))[0] != "403"
