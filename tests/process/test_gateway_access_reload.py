"""A reload of the gateway with TLS and tokens: open calls go on, and no new one is refused or loses its caller."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_protos import inference_pb2
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from runner.command import certificates
from tests.process.fake_runner import FAKES
from tests.support.connections import certificate
from tests.support.free_ports import start_stack
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish
from tests.waiting import until

KEY = SigningKey("only")


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
    stack = await start_stack(tmp_path / "run", settings, commands=FAKES, say=lambda _: None)
    yield stack
    await stack.stop()


def channel(stack, folder):
    credentials = grpc.ssl_channel_credentials((folder / "authority.crt").read_bytes())
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(stack.settings.gateway_with_tls, credentials, options)


async def is_known(opened):
    """Whether a call with the token reaches a service, which answers that it does not have the method."""
    own = (("authorization", f"Bearer {KEY.token()}"),)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await GRPCInferenceServiceStub(opened).ServerMetadata(
            inference_pb2.ServerMetadataRequest(), timeout=10, metadata=own
        )
    assert error.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
    return error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_reload_fails_no_call_over_tls_and_refuses_no_token(stack, tmp_path):
    folder = tmp_path / "certificates"
    async with channel(stack, folder) as opened:
        await until(lambda: is_known(opened))
        watch = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        known, stop = [], asyncio.Event()

        async def call_again_and_again():
            while not stop.is_set():
                async with channel(stack, folder) as new:
                    known.append(await is_known(new))
                await asyncio.sleep(0.005)

        calling = asyncio.create_task(call_again_and_again())
        before = stack.pid("envoy")
        await stack.reload()
        assert stack.pid("envoy") != before
        seen = len(known)
        await until(lambda: calling.done() or len(known) > seen + 50)
        stop.set()
        await calling
        assert set(known) == {True}
        assert not watch.done()
        watch.cancel()
        # The new generation of Envoy follows the files too.
        old = await asyncio.to_thread(certificate, stack.settings.gateway_with_tls)
        certificates.make(folder, ())
        await until(lambda: certificate(stack.settings.gateway_with_tls) != old, timeout_s=2)
    other = SigningKey("other")
    publish(tmp_path / "jwks.json", other)
    async with channel(stack, folder) as opened:
        await until(lambda: is_unknown(opened), timeout_s=2)


async def is_unknown(opened):
    return not await is_known(opened)
