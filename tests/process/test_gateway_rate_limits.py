"""A rate limit service counts the requests of limited clients for several gateways; and what happens without it."""

from __future__ import annotations

import asyncio
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.errors import OverloadedError, from_rpc_error
from headrace_protos import inference_pb2, inference_pb2_grpc
from tests.process.gateway_before_fakes import OPENAI, Answer, Gateway, running_gateway
from tests.process.test_gateway_keys import bearer, write
from tests.support.rate_limit_service import RateLimitService
from tests.waiting import until

LIMIT = 5
V2 = "/v2/models/a"
ANSWERS_WITHIN_S = 2.0  # Without the service.


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
            call = stub.ServerMetadata(request, metadata=tuple(bearer(self.keys[client]).items()), timeout=30)
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
    with urllib.request.urlopen(f"http://{gateway.inner}/stats/prometheus", timeout=10) as page:
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
    of_v2 = await shared.ask(client, path=V2, method="GET", body=b"")
    assert (of_v2.status, list(of_v2.json)) == (429, ["error"])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await shared.ask_by_grpc(client)
    seen = from_rpc_error(error.value, "gateway")
    assert isinstance(seen, OverloadedError)
    assert 1000 <= (seen.retry_after_ms or 0) <= 60_000
    assert ("x-ratelimit-remaining-requests", "0") in tuple(error.value.trailing_metadata() or ())


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
        began = time.monotonic()
        assert (await shared.ask(client)).status == 200
        assert (await shared.ask(client, gateway=1)).status == 503
        assert time.monotonic() - began < ANSWERS_WITHIN_S
    finally:
        shared.service.answers.set()


async def test_without_the_service_calls_pass_or_are_refused_as_configured(shared: Shared) -> None:
    client = shared.next_client()
    await shared.service.stop()
    try:
        own = b'{"metadata": {"x-ratelimit-limit-requests": 77}}'
        for _ in range(2 * LIMIT):
            began = time.monotonic()
            answer = await shared.ask(client, body=own)
            assert time.monotonic() - began < ANSWERS_WITHIN_S
            assert (answer.status, answer.headers["x-ratelimit-limit-requests"]) == (200, "77")
        refused = await shared.ask(client, gateway=1)
        assert (refused.status, refused.json["error"]["type"]) == (503, "server_error")
        assert refused.json["error"]["message"] == "the rate limit service does not answer"
        assert refused.headers["x-failed-hop"] == "gateway"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await shared.ask_by_grpc(client, gateway=1)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(counted, shared.gateways[0], "failure_mode_allowed") >= 2 * LIMIT
        assert await asyncio.to_thread(counted, shared.gateways[1], "error") >= 2
        # Clients without limits do not need the service.
        assert (await shared.ask("free", gateway=1)).status == 200
    finally:
        await shared.service.start(shared.port)

    async def counts_again() -> bool:
        answers = [await shared.ask(client, gateway=gateway) for gateway in (0, 1)]
        return all(answer.headers.get("x-ratelimit-limit-requests") == str(LIMIT) for answer in answers)

    await until(counts_again)
