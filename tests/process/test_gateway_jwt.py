"""Tokens of GATEWAY_JWKS: valid ones name the caller; the key set changes without interrupting a call."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from headrace_runner import envoy_config
from tests.process.gateway_before_fakes import OPENAI, Gateway, running_gateway
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish, publish_text, unsigned_token
from tests.waiting import until

TAKES_EFFECT_S = 2.0
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
async def gateway(tmp_path_factory: pytest.TempPathFactory, key_set: Path) -> AsyncIterator[Gateway]:
    settings = {"gateway_jwks": str(key_set), "gateway_jwt_issuer": ISSUER, "gateway_jwt_audience": AUDIENCE}
    async with running_gateway(tmp_path_factory.mktemp("jwt"), **settings) as running:
        assert await is_known(running, FIRST)  # No wait is needed: a call that finds no keys yet fetches them itself.
        await until(lambda: has_fetched(running))
        yield running


def has_fetched(gateway: Gateway) -> bool:
    """Whether the key set has been fetched independently of calls; only then it is kept."""
    name = "http.ingress.jwt_authn.jwks_fetch_success"
    with urllib.request.urlopen(f"http://{gateway.admin}/stats?filter=^{name}$", timeout=10) as stats:
        return int(stats.read().decode().rpartition(":")[2]) > LISTENERS


async def caller(gateway: Gateway, **headers: str) -> str | None:
    """The caller's name that a service sees; None if the gateway refuses the call as unauthenticated."""
    answer = await gateway.request("POST", OPENAI, b"{}", **headers)
    if answer.status == 401:
        assert answer.json["error"]["type"] == "authentication_error"
        return None
    assert answer.status == 200
    return str(answer.json["metadata"]["x-headrace-client"])


async def is_known(gateway: Gateway, key: SigningKey) -> bool:
    return await caller(gateway, authorization=f"Bearer {key.token()}") == "alice"


async def test_a_token_names_the_caller_and_is_not_passed_on(gateway: Gateway) -> None:
    token = FIRST.token(aud=["others", AUDIENCE], headrace_role="admin")
    for headers in ({"authorization": f"Bearer {token}"}, {"x_api_key": token}):
        answer = await gateway.request("POST", OPENAI, b"{}", **headers)
        assert json.loads(answer.json["metadata"]["x-headrace-policy"])["role"] == "admin"
        assert answer.json["metadata"]["x-headrace-client"] == "alice"
        assert token not in str(answer.json["metadata"])
    async with gateway.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ServerMetadata(
            inference_pb2.ServerMetadataRequest(), metadata=(("authorization", f"Bearer {token}"),)
        )
        received = (await call).extensions
        assert "x-headrace-client" in received
        assert "authorization" not in received
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ServerMetadata(
                inference_pb2.ServerMetadataRequest(), metadata=(("authorization", f"Bearer {REFUSED['expired']}"),)
            )
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    # Another key beside it does not matter.
    assert await caller(gateway, authorization="Bearer sk-1", x_api_key=token) == "alice"
    assert await caller(gateway) is None


@pytest.mark.parametrize("kind", REFUSED)
async def test_an_invalid_token_is_refused(gateway: Gateway, kind: str) -> None:
    assert await caller(gateway, authorization=f"Bearer {REFUSED[kind]}") is None
    assert await caller(gateway, x_api_key=REFUSED[kind]) is None


async def test_a_new_key_set_takes_effect_within_two_seconds_and_ends_no_stream(
    gateway: Gateway, key_set: Path
) -> None:
    gateway.openai.first_chunk_was_read.clear()
    async with gateway.channel() as channel:
        stub = headrace_pb2_grpc.TextGenerationStub(channel)
        own = (("authorization", f"Bearer {FIRST.token()}"),)
        streams = [stub.Generate(headrace_pb2.GenerateRequest(), metadata=own) for _ in range(64)]
        for stream in streams:
            assert (await stream.read()).text == "first"
        publish(key_set, SECOND)
        changed = time.monotonic()
        await until(lambda: is_known(gateway, SECOND))
        assert not await is_known(gateway, FIRST)
        assert time.monotonic() - changed < TAKES_EFFECT_S
        gateway.openai.first_chunk_was_read.set()
        for stream in streams:
            assert (await stream.read()).text == "last"
            assert await stream.code() is grpc.StatusCode.OK
    publish(key_set, FIRST)
    await until(lambda: is_known(gateway, FIRST))


@pytest.mark.parametrize("text", ['{"keys": []}', '{\n  "keys" : [\n  ]\n}\n'])
async def test_a_key_set_without_keys_makes_every_token_invalid(gateway: Gateway, key_set: Path, text: str) -> None:
    complaints = gateway.process.log.read_text().count("Jwks async fetching")
    publish_text(key_set, text)

    async def is_refused() -> bool:
        return not await is_known(gateway, FIRST)

    await until(is_refused, timeout_s=TAKES_EFFECT_S)
    assert gateway.process.log.read_text().count("Jwks async fetching") == complaints
    publish(key_set, FIRST)
    await until(lambda: is_known(gateway, FIRST), timeout_s=TAKES_EFFECT_S)


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


def test_the_key_set_is_readable_only_by_its_owner(gateway: Gateway) -> None:
    """It may contain shared secrets."""
    (socket,) = gateway.process.log.parent.glob("jwks.sock")
    assert socket.stat().st_mode & 0o777 == 0o600
