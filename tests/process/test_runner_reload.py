"""The gateway reloads without interrupting a call: open calls continue in the old Envoy, new ones reach the new one.

The services are fakes that implement only gRPC health; a `Watch` is the long stream.
"""

import asyncio
import http.client
import shutil
import signal

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import StartupError
from runner import envoy_config
from tests.process.fake_runner import FAKES, command
from tests.process.test_runner_stack import check, gone, runner
from tests.support.free_ports import start_stack
from tests.waiting import until

__all__ = ["runner"]

SERVING = health_pb2.HealthCheckResponse.SERVING
MESSAGE, OTHER_MESSAGE = "unknown path or method", "no handler answers there"


@pytest.fixture
def own_envoy_folder(tmp_path, monkeypatch):
    """A copy of the gateway's files that a test may change."""
    folder = tmp_path / "envoy"
    shutil.copytree(envoy_config.ENVOY_FOLDER, folder)
    monkeypatch.setattr(envoy_config, "ENVOY_FOLDER", folder)
    return folder


@pytest.fixture
async def reports():
    return []


@pytest.fixture
async def stack(tmp_path, own_envoy_folder, reports):
    stack = await start_stack(tmp_path / "run", {}, commands=FAKES, say=reports.append)
    yield stack
    await stack.stop()


def change(folder, old, new):
    path = folder / "envoy.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


async def unknown_path(gateway):
    """The gateway's message for an unknown path."""

    def ask():
        connection = http.client.HTTPConnection(gateway, timeout=30)
        try:
            connection.request("GET", "/nothing")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def watch(channel):
    """An open call that has been answered once, and is silent until its end."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await call.read()).status == SERVING
    return call


async def test_new_calls_use_the_new_configuration_and_open_ones_continue(stack, own_envoy_folder):
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        open_call = await watch(channel)
        for message in (OTHER_MESSAGE,):
            before = stack.pid("envoy")
            change(own_envoy_folder, MESSAGE, message)
            await stack.reload()
            assert stack.pid("envoy") != before
            assert message in await unknown_path(stack.gateway)
            assert await check(stack.gateway) == SERVING
            assert psutil.pid_exists(before)
        assert not open_call.done()
        open_call.cancel()


async def test_a_reload_waits_for_the_calls_of_the_generation_that_it_would_end(stack, reports):
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        open_call = await watch(channel)
        first = stack.pid("envoy")
        await stack.reload()
        second = stack.pid("envoy")
        waiting = asyncio.create_task(stack.reload())
        await until(lambda: any("reload waits" in line for line in reports))
        assert not waiting.done()
        assert not open_call.done()
        assert stack.pid("envoy") == second
        open_call.cancel()
        await asyncio.wait_for(waiting, 30)
    assert stack.pid("envoy") not in (first, second)
    await until(lambda: not psutil.pid_exists(first))


async def test_no_unary_call_fails_over_reloads(stack):
    failed, answered, stop = [], [0], asyncio.Event()

    async def call_again_and_again(new_connections):
        channel = grpc.aio.insecure_channel(stack.gateway)
        while not stop.is_set():
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                answered[0] += 1
            except grpc.aio.AioRpcError as error:
                failed.append(error)
            await asyncio.sleep(0.005)  # Otherwise the calls take most of the processor from the reload.
            if new_connections:
                await channel.close()
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = grpc.aio.insecure_channel(stack.gateway, options=options)
        await channel.close()

    callers = [asyncio.create_task(call_again_and_again(number % 2 == 0)) for number in range(4)]
    await until(lambda: failed or answered[0] > 50)
    for _ in range(2):
        before = answered[0]
        await stack.reload()
        await until(lambda at_least=before + 50: failed or answered[0] > at_least)
    stop.set()
    await asyncio.gather(*callers)
    assert failed == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("static_resources:", "static_resources: ["),
        pytest.param("static_resources:", "other_resources:", marks=pytest.mark.full),
        pytest.param("stat_prefix: ingress", "stat_prefiks: ingress", marks=pytest.mark.full),
        ("/etc/envoy/descriptors.pb", "/etc/envoy/nothing.pb"),
    ],
)
async def test_a_configuration_that_is_refused_changes_nothing(stack, own_envoy_folder, old, new):
    before, config = stack.pid("envoy"), stack.folder.envoy_config.read_text()
    change(own_envoy_folder, old, new)
    with pytest.raises(StartupError) as refused:
        await stack.reload()
    assert str(refused.value)
    assert "\n" not in str(refused.value)
    assert stack.pid("envoy") == before
    assert stack.folder.envoy_config.read_text() == config
    assert MESSAGE in await unknown_path(stack.gateway)
    change(own_envoy_folder, new, old)
    await stack.reload()
    assert stack.pid("envoy") != before


async def test_an_envoy_that_dies_after_a_reload_is_restarted_and_can_be_reloaded(stack, reports):
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        open_call = await watch(channel)
        await stack.reload()
        await stack.kill("envoy")
        await stack.wait_ready(timeout_s=30)
        assert await check(stack.gateway) == SERVING
        assert not open_call.done()  # It is in the previous Envoy.
        open_call.cancel()
    await stack.reload()
    assert await check(stack.gateway) == SERVING
    assert [line.partition(" (see")[0] for line in reports if "envoy" in line] == [
        "envoy was ended by SIGKILL; starting it again in 0.2 s"
    ]


def wait_for_line(runner, text):
    for line in runner.process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never logged")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_runner_reloads_on_request_and_leaves_no_generation(runner, signum):
    before = runner.wait_ready()
    with grpc.insecure_channel(runner.settings.gateway) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(call).status == SERVING
        result = command(runner, "reload")
        assert result.returncode == 0, result.stderr
        wait_for_line(runner, "reloaded: ")
        after = runner.services()
        assert set(before) < set(after)
        runner.process.send_signal(signum)
        assert runner.process.wait(timeout=15) == (0 if signum == signal.SIGINT else -signum)
        assert gone(after, within_s=45)  # Envoy ends late if its parent died with the runner.
        call.cancel()


def test_a_reload_without_a_stack_is_refused(tmp_path, monkeypatch):
    from runner.__main__ import reload
    from runner.run_folder import RunFolder

    with pytest.raises(StartupError, match="no stack is running"):
        reload(RunFolder(tmp_path))
