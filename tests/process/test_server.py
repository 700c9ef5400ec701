"""The server of every service: health, reflection, and an orderly stop within the drain time."""

import os
import signal
import sys

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES
from headrace.rpc.server.listeners import RETIRE
from headrace.rpc.server.server import Server
from headrace.settings import ServiceSettings
from headrace_protos import headrace_pb2, reflection_v1_pb2, reflection_v1_pb2_grpc
from headrace_runner.settings import ROOT
from tests.support.forkserver import spawn
from tests.support.listening import listening
from tests.support.logger_process import free_port
from tests.support.status import code_of, refusal
from tests.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PUBLIC = [headrace_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("PayloadLog", "TextGeneration")]


class Service:
    """tests/process/counting_service.py as a process."""

    def __init__(self, folder):
        folder.mkdir()
        self.target = f"127.0.0.1:{free_port()}"
        self.process = None
        self._events_file, self._log = folder / "events", folder / "log"
        self._events_file.touch()

    async def start(self, settings):
        own = {"TEST_PORT": self.target.rsplit(":", 1)[1], "TEST_EVENTS_FILE": str(self._events_file)}
        command = (sys.executable, "-m", "tests.process.counting_service")
        with self._log.open("wb") as log:
            self.process = await spawn(command, os.environ | own | settings, ROOT, log)

    async def ended(self):
        """(exit status, its events, standard error)."""
        status = await self.process.wait()
        return status, self._events_file.read_text(), self._log.read_text()

    async def end(self):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()


@pytest.fixture
async def start(tmp_path):
    services = []

    async def start(**settings):
        services.append(Service(tmp_path / str(len(services))))
        await services[-1].start(settings)
        return services[-1]

    yield start
    for service in services:
        await service.end()


@pytest.fixture
async def server():
    server = Server("test", ServiceSettings.model_construct(drain_s=0.0), PUBLIC)
    async with listening(server.grpc) as server.target:
        yield server


def count(channel, numbers):
    return channel.unary_stream("/test/count")(str(numbers).encode(), wait_for_ready=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_turns_health_first_and_lets_calls_finish(start, signum):
    service = await start(TEST_DRAIN_S="30")
    async with grpc.aio.insecure_channel(service.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        calls = [count(channel, 30) for _ in range(3)]
        for call in calls:
            assert await call.read() == b"0"
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "ready")]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        service.process.send_signal(signum)
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
        assert not any(call.done() for call in calls), "health speaks before the calls end"
        for watch in watches:
            watch.cancel()
        for call in calls:
            assert [int(number) async for number in _rest(call)] == list(range(1, 30))
            assert await call.code() is grpc.StatusCode.OK
    status, events, stderr = await service.ended()
    assert status == 0
    assert events.splitlines() == ["task ended", "second closed", "first closed"]
    assert "Traceback" not in stderr


async def _rest(call):
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def _last(call):
    return [response async for response in _rest(call)][-1]


async def test_the_drain_precedes_the_end_and_its_failure_does_not_prevent_it(start):
    service = await start(TEST_DRAIN_S="30", TEST_DRAINS="1")
    async with grpc.aio.insecure_channel(service.target) as channel:
        call = count(channel, 20)
        assert await call.read() == b"0"
        service.process.send_signal(signal.SIGTERM)
        assert await _last(call) == b"19"
    status, events, stderr = await service.ended()
    assert status == 0
    assert events.splitlines() == ["drains for 30.0", "task ended", "second closed", "first closed"]
    assert "draining failed" in stderr


async def test_a_blocked_event_loop_ends_the_process_with_every_traceback(start):
    service = await start(TEST_LOOP_TIMEOUT="0.5")
    async with grpc.aio.insecure_channel(service.target) as channel:
        await refusal(channel.unary_unary("/test/block")(b"", wait_for_ready=True))
    status, events, stderr = await service.ended()
    assert (status, events) == (os.EX_SOFTWARE, "blocks\n")
    assert "the event loop has not answered for 0.5 s" in stderr
    assert "in block" in stderr


@pytest.mark.parametrize("how", ["raises", "cancelled"])
async def test_a_background_task_that_fails_ends_the_process_non_zero(start, how):
    service = await start(TEST_FAIL=how)
    status, events, stderr = await service.ended()
    assert status not in (0, 78)
    assert "task engine failed" in stderr
    assert "task ended" in events, "the others are ended in order nevertheless"


async def test_a_taken_port_is_one_line_and_may_pass(server, start):
    service = await start(TEST_PORT=server.target.rsplit(":", 1)[1])
    status, _, stderr = await service.ended()
    assert status == os.EX_TEMPFAIL == 75
    lines = [line for line in stderr.splitlines() if not line.startswith("E")]  # gRPC's own line
    assert lines == [f"test: {server.target} cannot be listened on: is the port taken?"]


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_the_public_services(server, version):
    async with grpc.aio.insecure_channel(server.target) as channel:
        if version == "v1":
            stub, messages = reflection_v1_pb2_grpc.ServerReflectionStub(channel), reflection_v1_pb2
        else:
            stub, messages = reflection_pb2_grpc.ServerReflectionStub(channel), reflection_pb2
        requests = [
            messages.ServerReflectionRequest(list_services="*"),
            messages.ServerReflectionRequest(file_containing_symbol="headrace.v1.TextGeneration"),
            messages.ServerReflectionRequest(file_containing_symbol="no.such.Thing"),
        ]
        listed, file, missing = [response async for response in stub.ServerReflectionInfo(iter(requests))]
    assert sorted(service.name for service in listed.list_services_response.service) == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        *PUBLIC,
    ]
    assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_messages_up_to_the_limit_pass(server):
    """60 MiB, the limit of the gateway."""

    async def size(request, context):
        return str(len(request)).encode()

    handler = grpc.method_handlers_generic_handler("test", {"size": grpc.unary_unary_rpc_method_handler(size)})
    server.grpc.add_generic_rpc_handlers((handler,))
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(server.target, options=options) as channel:
        call = channel.unary_unary("/test/size")
        assert await call(bytes(60 * 1024 * 1024)) == str(60 * 1024 * 1024).encode()
        assert await code_of(call(bytes(MAX_MESSAGE_BYTES + 1))) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_retired_server_ends_with_its_last_call_and_its_successor_takes_the_new_ones(start):
    old = await start(TEST_LISTEN="shared")
    async with grpc.aio.insecure_channel(old.target) as channel:
        assert [number async for number in count(channel, 1)] == [b"0"]
        new = await start(TEST_LISTEN="take-over", TEST_PORT=old.target.rsplit(":", 1)[1])
        await until(lambda: listens(new))
        call = count(channel, 60)
        assert await call.read() == b"0"
        old.process.send_signal(RETIRE)
        await until(lambda: not listens(old))
        assert old.process.returncode is None
        async with grpc.aio.insecure_channel(old.target, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            assert [number async for number in count(other, 3)] == [b"0", b"1", b"2"]
        assert [await call.read() for _ in range(60)] == [*(str(n).encode() for n in range(1, 60)), grpc.aio.EOF]
    status, _, stderr = await old.ended()
    assert status == 0
    assert "a successor has taken over" in stderr
    assert new.process.returncode is None


def listens(service):
    connections = psutil.Process(service.process.pid).net_connections("tcp")
    return any(connection.status == psutil.CONN_LISTEN for connection in connections)
