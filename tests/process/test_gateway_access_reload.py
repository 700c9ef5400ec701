"""A reload of the gateway with TLS and tokens: open calls go on, and no new one is refused or loses its caller."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runner.command import certificates
from runner.free_ports import start_stack
from tests.process.fake_runner import FAKES
from tests.process.test_gateway_jwt import show_the_caller
from tests.support.connections import certificate
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish
from tests.waiting import until

KEY = SigningKey("only")


def show_the_caller_with_tls(config):
    show_the_caller(config)
    listeners = {listener["name"]: listener for listener in config["static_resources"]["listeners"]}
    listeners["tls"]["filter_chains"][0]["filters"] = listeners["ingress"]["filter_chains"][0]["filters"]


@pytest.fixture
async def stack(tmp_path):
    folder, key_set = tmp_path / "certificates", tmp_path / "jwks.json"
    certificates.make(folder, ())
    publish(key_set, KEY)
    settings = {
        "gateway_tls": str(folder),
        "gateway_jwks": str(key_set),
        "gateway_jwt_issuer": ISSUER,
        "gateway_jwt_audience": AUDIENCE,
    }
    stack = await start_stack(
        tmp_path / "run", settings, commands=FAKES, say=lambda _: None, change_gateway=show_the_caller_with_tls
    )
    yield stack
    await stack.stop()


def channel(stack, folder):
    credentials = grpc.ssl_channel_credentials((folder / "authority.crt").read_bytes())
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(stack.settings.gateway_with_tls, credentials, options)


async def caller_of(opened):
    """Whom the gateway takes the caller for."""
    own = (("authorization", f"Bearer {KEY.token()}"),)
    call = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=10, metadata=own)
    return dict(await call.initial_metadata()).get("x-subject")


async def test_a_reload_costs_no_call_over_tls_and_no_token(stack, tmp_path):
    folder = tmp_path / "certificates"
    async with channel(stack, folder) as opened:
        await until(lambda: is_alice(opened))
        watch = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        callers, stop = [], asyncio.Event()

        async def call_again_and_again():
            while not stop.is_set():
                async with channel(stack, folder) as new:
                    callers.append(await caller_of(new))
                await asyncio.sleep(0.005)

        calling = asyncio.create_task(call_again_and_again())
        before = stack.pid("envoy")
        await stack.reload()
        assert stack.pid("envoy") != before
        seen = len(callers)
        await until(lambda: calling.done() or len(callers) > seen + 50)
        stop.set()
        await calling
        assert set(callers) == {"alice"}
        assert not watch.done()
        watch.cancel()
        # The new generation follows the files too.
        old = await asyncio.to_thread(certificate, stack.settings.gateway_with_tls)
        certificates.make(folder, ())
        await until(lambda: certificate(stack.settings.gateway_with_tls) != old, timeout_s=2)
    other = SigningKey("other")
    publish(tmp_path / "jwks.json", other)
    async with channel(stack, folder) as opened:
        await until(lambda: is_nobody(opened), timeout_s=2)


async def is_alice(opened):
    return await caller_of(opened) == "alice"


async def is_nobody(opened):
    return await caller_of(opened) is None
