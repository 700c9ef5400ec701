"""Tokens of GATEWAY_JWKS name the caller in the gateway's metadata; the key set changes at the cost of no call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from millrace_protos import inference_pb2, inference_pb2_grpc, rest_pb2_grpc
from tests.process.gateway_before_fakes import OPENAI, Gateway, HttpBody, running_gateway
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish, publish_text, unsigned_token
from tests.waiting import until

TAKES_EFFECT_S = 2.0
FIRST, SECOND = SigningKey("first"), SigningKey("second")
REFUSED = {
    "expired": FIRST.token(exp=int(time.time()) - 3600),
    "does not expire": FIRST.token(exp=None),
    "not yet": FIRST.token(nbf=int(time.time()) + 3600),
    "of another audience": FIRST.token(aud="another"),
    "for nobody": FIRST.token(aud=None),
    "of another issuer": FIRST.token(iss="https://another.example"),
    "of nobody": FIRST.token(iss=None),
    "signed by another key of that name": SigningKey("first").token(),
    "signed by an unknown key": SECOND.token(),
    "unsigned": unsigned_token(),
    "cut": FIRST.token()[:-10],
    "an API key": "sk-0123456789",
}


def show_the_caller(config: dict[str, Any]) -> None:
    """The gateway's answers name the subject of the token."""
    for listener in config["static_resources"]["listeners"]:
        if listener["name"] == "ingress":
            manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
            value = "%DYNAMIC_METADATA(envoy.filters.http.jwt_authn:jwt:sub)%"
            header = {"header": {"key": "x-subject", "value": value}}
            manager["route_config"].setdefault("response_headers_to_add", []).append(header)


@pytest.fixture(scope="module")
def key_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("access") / "jwks.json"
    publish(file, FIRST)
    return file


@pytest_asyncio.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, key_set: Path) -> AsyncIterator[Gateway]:
    settings = {"gateway_jwks": str(key_set), "gateway_jwt_issuer": ISSUER, "gateway_jwt_audience": AUDIENCE}
    async with running_gateway(tmp_path_factory.mktemp("jwt"), show_the_caller, **settings) as running:
        await until(lambda: is_known(running, FIRST))
        yield running


async def subject(gateway: Gateway, **headers: str) -> str | None:
    """Whom the gateway takes the caller for; None if for nobody."""
    answer = await gateway.request("POST", OPENAI, b"{}", **headers)
    assert answer.status == 200
    return answer.headers.get("x-subject")


async def is_known(gateway: Gateway, key: SigningKey) -> bool:
    return await subject(gateway, authorization=f"Bearer {key.token()}") == "alice"


async def test_a_token_names_the_caller_and_goes_no_further(gateway: Gateway) -> None:
    token = FIRST.token(aud=["others", AUDIENCE], millrace_role="admin")
    for headers in ({"authorization": f"Bearer {token}"}, {"x_api_key": token}):
        answer = await gateway.request("POST", OPENAI, b"{}", **headers)
        assert answer.headers["x-subject"] == "alice"
        assert token not in str(answer.json["metadata"])
    async with gateway.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ServerMetadata(
            inference_pb2.ServerMetadataRequest(), metadata=(("authorization", f"Bearer {token}"),)
        )
        assert dict(await call.initial_metadata())["x-subject"] == "alice"
        assert "authorization" not in (await call).extensions
    # Another key beside it is not in its way.
    assert await subject(gateway, authorization="Bearer sk-1", x_api_key=token) == "alice"
    assert await subject(gateway) is None


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_is_no_valid_token_names_nobody(gateway: Gateway, kind: str) -> None:
    assert await subject(gateway, authorization=f"Bearer {REFUSED[kind]}") is None
    assert await subject(gateway, x_api_key=REFUSED[kind]) is None


async def test_a_new_key_set_counts_within_two_seconds_and_costs_no_stream(gateway: Gateway, key_set: Path) -> None:
    gateway.openai.first_chunk_was_read.clear()
    async with gateway.channel() as channel:
        stub = rest_pb2_grpc.OpenAIStub(channel)
        own = (("authorization", f"Bearer {FIRST.token()}"),)
        streams = [stub.Completions(HttpBody(data=b'{"stream": true}'), metadata=own) for _ in range(64)]
        for stream in streams:
            assert (await stream.read()).data == b"data: 1\n\n"
        publish(key_set, SECOND)
        changed = time.monotonic()
        await until(lambda: is_known(gateway, SECOND))
        assert not await is_known(gateway, FIRST)
        assert time.monotonic() - changed < TAKES_EFFECT_S
        gateway.openai.first_chunk_was_read.set()
        for stream in streams:
            assert (await stream.read()).data == b"data: [DONE]\n\n"
            assert await stream.code() is grpc.StatusCode.OK
    publish(key_set, FIRST)
    await until(lambda: is_known(gateway, FIRST))


@pytest.mark.parametrize("text", ["{broken", '{"keys": []}', ""])
async def test_what_is_no_key_set_leaves_the_last_good_one_and_is_logged(
    gateway: Gateway, key_set: Path, text: str
) -> None:
    complaints = gateway.process.log.read_text().count("Jwks async fetching")
    publish_text(key_set, text)
    await until(lambda: gateway.process.log.read_text().count("Jwks async fetching") >= complaints + 3)
    assert await is_known(gateway, FIRST)
    publish(key_set, SECOND)
    await until(lambda: is_known(gateway, SECOND))
    publish(key_set, FIRST)
    await until(lambda: is_known(gateway, FIRST))


def test_nobody_else_reads_the_key_set(gateway: Gateway) -> None:
    """It may be of shared secrets."""
    (socket,) = gateway.process.log.parent.glob("jwks.sock")
    assert socket.stat().st_mode & 0o777 == 0o600
