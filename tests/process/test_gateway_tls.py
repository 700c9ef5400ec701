"""The port with TLS: its calls, clients' certificates, and a new certificate, which interrupts no call."""

import asyncio
import json
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from headrace_runner.command import __main__ as command_line
from headrace_runner.command.access import make_certificates
from headrace_runner.settings import ROOT
from tests.process.gateway_before_fakes import METADATA, OPENAI, Gateway, running_gateway
from tests.support.connections import certificate, context, handshake, request
from tests.support.status import code_of
from tests.waiting import until

STREAMS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, ())
    return folder


@pytest_asyncio.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("tls"), gateway_tls=str(folder)) as running:
        yield running


def channel(gateway: Gateway, folder: Path, *, with_certificate: bool = False) -> grpc.aio.Channel:
    own = [(folder / name).read_bytes() for name in ("client.key", "client.crt")] if with_certificate else [None, None]
    credentials = grpc.ssl_channel_credentials((folder / "authority.crt").read_bytes(), *own)
    return grpc.aio.secure_channel(gateway.tls, credentials, (("grpc.use_local_subchannel_pool", 1),))


async def test_http_2_and_1_1_are_agreed_on_and_old_versions_are_refused(gateway: Gateway, folder: Path) -> None:
    for offered, chosen in ((["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None)):
        made = context(folder)
        if offered:
            made.set_alpn_protocols(offered)
        assert await asyncio.to_thread(handshake, gateway.tls, made) == ("TLSv1.3", chosen)
    made = context(folder)
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await asyncio.to_thread(handshake, gateway.tls, made) == ("TLSv1.2", None)
    made = context(folder)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1_1
    made.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match=r"alert protocol version"):
        await asyncio.to_thread(handshake, gateway.tls, made)


async def test_every_protocol_is_served(gateway: Gateway, folder: Path) -> None:
    async with channel(gateway, folder) as secure:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(secure)
        assert (await stub.ServerMetadata(inference_pb2.ServerMetadataRequest())).name == "transformer"
        stream = stub.ModelStreamInfer(inference_pb2.ModelInferRequest(id=str(number)) for number in range(3))
        assert [response.infer_response.id async for response in stream] == ["0", "1", "2"]

    async def ask(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(request, gateway.tls, context(folder), method, path, body, **headers)

    status, body = await ask("POST", METADATA, bytes(5), content_type="application/grpc-web+proto")
    assert (status, b"grpc-status:0" in body) == (200, True)
    status, body = await ask("POST", OPENAI, b"{}", origin=f"https://{gateway.tls}")
    assert status == 200
    assert json.loads(body)["metadata"]["x-forwarded-proto"] == "https"
    status, body = await ask("POST", OPENAI, b"{}", x_forwarded_proto="http")
    assert json.loads(body)["metadata"]["x-forwarded-proto"] == "https"
    assert (await ask("POST", OPENAI, b"{}", origin="https://evil.example"))[0] == 403
    assert (await ask("GET", "/"))[0] == (await ask("GET", "/playground/main.js"))[0] == 200
    status, body = await ask("GET", "/v2/health/ready")
    assert (status, json.loads(body)) == (503, {"error": 'model "a" is loading'})


async def test_new_connections_use_a_new_certificate_and_no_stream_ends(gateway: Gateway, folder: Path) -> None:
    gateway.openai.first_chunk_was_read.clear()
    channels = [channel(gateway, folder) for _ in range(8)]
    streams = [
        headrace_pb2_grpc.TextGenerationStub(channels[number % len(channels)]).Generate(headrace_pb2.GenerateRequest())
        for number in range(STREAMS)
    ]
    for stream in streams:
        assert (await stream.read()).text == "first"
    before = await asyncio.to_thread(certificate, gateway.tls)
    make_certificates(folder, ())
    await until(lambda: certificate(gateway.tls) != before)
    await asyncio.to_thread(handshake, gateway.tls, context(folder))  # Signed by the new authority.
    gateway.openai.first_chunk_was_read.set()
    for stream in streams:
        assert (await stream.read()).text == "last"
        assert await stream.code() is grpc.StatusCode.OK
    for each in channels:
        await each.close()


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
async def test_unreadable_files_leave_the_last_valid_certificate(gateway: Gateway, folder: Path, name: str) -> None:
    good, kept = await asyncio.to_thread(certificate, gateway.tls), (folder / name).read_bytes()
    complaints = gateway.process.log.read_text().count("Failed to reload certificates")
    (folder / "new").write_text("-----BEGIN CERTIFICATE-----\nbroken")
    (folder / "new").replace(folder / name)
    await until(lambda: gateway.process.log.read_text().count("Failed to reload certificates") > complaints)
    assert await asyncio.to_thread(certificate, gateway.tls) == good
    (folder / "new").write_bytes(kept)
    (folder / "new").replace(folder / name)
    await asyncio.to_thread(handshake, gateway.tls, context(folder))


async def test_a_volume_of_kubernetes_is_followed(tmp_path: Path) -> None:
    """Its files are links into a folder behind another link, which is replaced."""
    volume, made = tmp_path / "volume", tmp_path / "made"
    volume.mkdir()

    def publish(version: str) -> None:
        make_certificates(made, ())
        shutil.copytree(made, volume / version)
        (volume / "..data_tmp").symlink_to(version)
        (volume / "..data_tmp").replace(volume / "..data")

    publish("..1")
    for name in ("tls.crt", "tls.key"):
        (volume / name).symlink_to(f"..data/{name}")
    async with running_gateway(tmp_path, gateway_tls=str(volume)) as gateway:
        await asyncio.to_thread(handshake, gateway.tls, context(made))
        before = await asyncio.to_thread(certificate, gateway.tls)
        publish("..2")
        await until(lambda: certificate(gateway.tls) != before)
        await asyncio.to_thread(handshake, gateway.tls, context(made))


async def test_with_an_authority_only_its_clients_are_served_and_it_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    make_certificates(folder, (), ask_clients=True)
    async with running_gateway(tmp_path, gateway_tls=str(folder)) as gateway:

        async def answers(tls: ssl.SSLContext) -> bool:
            try:
                return (await asyncio.to_thread(request, gateway.tls, tls, "GET", "/"))[0] == 200
            except OSError:
                return False

        async with channel(gateway, folder, with_certificate=True) as secure:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(secure)
            assert (await stub.ServerMetadata(inference_pb2.ServerMetadataRequest())).name == "transformer"
        async with channel(gateway, folder) as secure:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(secure)
            assert (
                await code_of(stub.ServerMetadata(inference_pb2.ServerMetadataRequest())) is grpc.StatusCode.UNAVAILABLE
            )
        known = context(folder, with_certificate=True)
        assert await answers(known)
        assert not await answers(context(folder))
        # The port without TLS is for this machine alone, and needs no certificate.
        assert (await gateway.request("GET", "/")).status == 200

        # After a change of the authority its clients are served, and those of the previous one are not.
        before = tmp_path / "before"
        shutil.copytree(folder, before)
        make_certificates(folder, (), ask_clients=True)
        await until(lambda: answers(context(folder, with_certificate=True)))
        stranger = context(folder)
        stranger.load_cert_chain(str(before / "client.crt"), str(before / "client.key"))
        assert not await answers(stranger)


async def test_the_commands_of_the_documentation_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "production.md").read_text().split("\n## TLS\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    makes = [line for block in blocks for line in block.splitlines() if line.startswith("make certs")]
    calls = [block for block in blocks if block.startswith("curl")]
    assert len(makes) == len(calls) == 2
    folder = tmp_path / ".run" / "certs"
    for make, call in zip(makes, calls, strict=True):
        (command,) = re.findall(r"-m headrace_runner\.command (certs.*)", (await run(f"{make} --dry-run", ROOT)).stdout)
        command_line.main([*command.split(), "--folder", str(folder)])
        async with running_gateway(tmp_path, gateway_tls=str(folder)) as gateway:
            here = call.replace("localhost:8443", f"localhost:{gateway.tls.rpartition(':')[2]}")
            ran = await run(here, tmp_path)
            assert ran.returncode == 0, ran.stderr
            assert json.loads(ran.stdout)


async def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", line]
    return await asyncio.to_thread(subprocess.run, command, cwd=folder, capture_output=True, text=True)
