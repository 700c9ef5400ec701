"""The gateway holds gRPC calls until their first message arrives: how long, how many, and how they end."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.process.gateway_before_fakes import METADATA, Gateway, running_gateway
from tests.support.http2_client import DATA, END_HEADERS, HEADERS, RST_STREAM, SETTINGS, frame, headers
from tests.support.status import refusal
from tests.waiting import until

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
GENERATE = "/headrace.v1.TextGeneration/Generate"
MAX, MAX_OF_CALLER = 400, 300
EACH = 100  # Calls of one connection.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")
SILENT_S = 1


@pytest_asyncio.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("held"), environment={"HELD_CALLS": str(MAX)}) as running:
        yield running


def ends_soon(config: dict[str, Any]) -> None:
    """Cuts the limit of silent calls to a second."""
    for listener in config["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["stream_idle_timeout"] = f"{SILENT_S}s"
        for host in manager["route_config"]["virtual_hosts"]:
            for route in host["routes"]:
                route.get("route", {}).pop("idle_timeout", None)


def figure(gateway: Gateway, name: str) -> int:
    with urllib.request.urlopen(f"http://{gateway.admin}/stats?filter=^{name}$", timeout=60) as stats:
        return int(stats.read().decode().rpartition(":")[2])


def of_clients(gateway: Gateway) -> int:
    return figure(gateway, "http.ingress.downstream_rq_active")


def of_services(gateway: Gateway) -> int:
    return sum(figure(gateway, f"cluster.{name}.upstream_rq_active") for name in ("transformer", "predictor", "logger"))


class Caller:
    """Connections of one address, with calls of which only the headers are sent."""

    def __init__(self, gateway: Gateway, address: str) -> None:
        self._gateway = gateway
        self._address = address
        self._writers: list[asyncio.StreamWriter] = []

    async def call(self, count: int, path: str = STREAM) -> None:
        """Begins `count` calls on a new connection."""
        host, _, port = self._gateway.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), local_addr=(self._address, 0))
        self._writers.append(writer)
        streams = range(1, 2 * count, 2)
        writer.write(PREFACE + b"".join(frame(HEADERS, END_HEADERS, stream, headers(path)) for stream in streams))
        await writer.drain()

    async def begin(self, stream: int) -> None:
        """Sends the first byte of a message on the latest connection."""
        self._writers[-1].write(frame(DATA, 0, stream, b"\0"))
        await self._writers[-1].drain()

    async def reset(self, count: int) -> None:
        """Resets the calls of the latest connection."""
        reset = (8).to_bytes(4)
        self._writers[-1].write(b"".join(frame(RST_STREAM, 0, stream, reset) for stream in range(1, 2 * count, 2)))
        await self._writers[-1].drain()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def callers(gateway: Gateway) -> AsyncIterator[tuple[Caller, Caller]]:
    """Two of different addresses."""
    pair = Caller(gateway, "127.0.0.1"), Caller(gateway, "127.0.0.2")
    before = of_clients(gateway)
    try:
        yield pair
    finally:
        for caller in pair:
            await caller.close()
        await until(lambda: of_clients(gateway) <= before)  # A call of the test before may have been ending.


async def held(gateway: Gateway, count: int) -> None:
    """Waits until the gateway holds so many calls more than the services."""
    await until(lambda: of_clients(gateway) - of_services(gateway) == count)


@pytest.mark.parametrize("path", [STREAM, GENERATE])
async def test_a_call_reaches_a_service_with_its_first_byte(gateway: Gateway, path: str) -> None:
    async with callers(gateway) as (caller, _):
        before = of_services(gateway)
        await caller.call(3, path)
        await held(gateway, 3)
        assert of_services(gateway) == before
        await caller.begin(stream=1)
        # The fake service has no such method and ends the call.
        await until(lambda: of_clients(gateway) - of_services(gateway) == 2)


async def test_a_stream_that_begins_late_is_served(gateway: Gateway) -> None:
    begins = asyncio.Event()

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        await begins.wait()
        yield pb.ModelInferRequest(id="late")

    async with gateway.channel() as channel:
        responses = GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        await held(gateway, 1)
        begins.set()
        assert [response.infer_response.id async for response in responses] == ["late"]


@pytest.mark.parametrize(
    ("path", "authority"), [(STREAM, "predictor"), ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", None)]
)
async def test_the_gateway_answers_a_stream_without_messages(
    gateway: Gateway, path: str, authority: str | None
) -> None:
    before = figure(gateway, "cluster.transformer.upstream_rq_total")
    async with gateway.channel(authority) as channel:
        call = channel.stream_stream(path)(iter(()))
        assert [response async for response in call] == []
        assert await call.code() is grpc.StatusCode.OK
    assert figure(gateway, "cluster.transformer.upstream_rq_total") == before


async def test_a_unary_call_without_a_message_reaches_its_service(gateway: Gateway) -> None:
    before = of_services(gateway)
    async with gateway.channel() as channel:
        call = channel.stream_unary(METADATA)(iter(()))  # The fakes do not answer such a call.
        await until(lambda: of_services(gateway) == before + 1)
        call.cancel()


async def test_calls_beyond_the_limits_reach_the_services(gateway: Gateway) -> None:
    async with callers(gateway) as (greedy, other):
        for _ in range(4):
            await greedy.call(EACH)
        await until(lambda: of_services(gateway) == 4 * EACH - MAX_OF_CALLER)
        await other.call(EACH)
        await held(gateway, MAX_OF_CALLER + EACH)
        await other.call(EACH)
        await held(gateway, MAX)
        # Forwarded calls count no more, nor do reset ones, for which no code of the gateway runs.
        await greedy.reset(EACH)
        await until(lambda: of_clients(gateway) == 5 * EACH)
        await greedy.close()
        await until(lambda: of_clients(gateway) == 2 * EACH)

        async def is_held_again() -> bool:
            calls, begun = of_clients(gateway), of_services(gateway)
            await greedy.call(1)
            await until(lambda: of_clients(gateway) > calls)
            return of_services(gateway) == begun

        await until(is_held_again)


async def test_a_call_that_stays_silent_ends_with_deadline_exceeded(tmp_path_factory: pytest.TempPathFactory) -> None:
    silence = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        await silence.wait()
        yield b""

    async with running_gateway(tmp_path_factory.mktemp("silent"), change=ends_soon) as gateway:
        for path in (STREAM, METADATA):
            async with gateway.channel() as channel:
                ended = await refusal(channel.stream_unary(path)(requests()))
            assert ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert ended.details() == "nothing came for as long as a call may be silent"
            assert dict(ended.trailing_metadata() or ())["x-failed-hop"] == "gateway"
