"""Full volumes, few descriptors and a predictor without memory, under eight streams: all returns by itself."""

import asyncio
import os
import time
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio

from tests.chaos.health import serves
from tests.containers.calls import channel, generate
from tests.containers.stack import FILES, ComposeStack
from tests.support.full import FULL
from tests.support.small_disk import small_disk
from tests.waiting import until

STREAMS, TOKENS = 8, 40
SECONDS = 20 if FULL else 3
BACK_S = 180.0  # The engine restarts a container after a minute at most.
SERVICES = ("transformer", "predictor", "logger", "envoy")
DESCRIPTORS = 256
LITTLE_MEMORY = 160 << 20  # Less than torch needs.
VOLUMES = ("payloads", "spool", "predictor-spool", "batches", "routes")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")


@pytest_asyncio.fixture(scope="module")
async def disk_and_stack(built, tmp_path_factory):
    """A stack whose volumes are folders of one small disk."""
    folder = tmp_path_factory.mktemp("full")
    with small_disk(folder / "disk", megabytes=96, inodes=400) as disk:
        disk.path.chmod(0o777)
        lines = ["volumes:"]
        for name in VOLUMES:
            (disk.path / name).mkdir(mode=0o777)
            (disk.path / name).chmod(0o777)
            options = f"{{type: none, o: bind, device: {disk.path / name}}}"
            lines.append(f"  {name}: {{driver: local, driver_opts: {options}}}")
        lines.append("services:")
        limits = f"ulimits: {{nofile: {DESCRIPTORS}}}"
        lines += [f"  {name}: {{{limits}{', scale: 2' * (name == 'predictor')}}}" for name in SERVICES]
        overlay = folder / "small.yaml"
        overlay.write_text("\n".join(lines) + "\n")
        stack = ComposeStack(folder / "wheels", (*FILES, str(overlay)), "headrace-full")
        (folder / "wheels").mkdir()
        try:
            stack.compose("up", "--wait", "--no-build", *SERVICES)
            yield disk, stack
        finally:
            stack.compose("down", "--volumes", "--remove-orphans")


@asynccontextmanager
async def streaming(stack, outcomes):
    """Streams one after the other by each of STREAMS callers; `outcomes` gets when each began and ended, and its error.

    Yields a check whether as many were answered as there are callers, of those that began after a time.
    """
    enough = asyncio.Event()

    async def stream():
        async with channel(stack.gateway) as open_channel:
            while not enough.is_set():
                began = time.monotonic()
                try:
                    await generate(open_channel, TOKENS, asyncio.Event())
                    outcomes.append((began, time.monotonic(), None))
                except Exception as error:  # Judged below.
                    outcomes.append((began, time.monotonic(), error))
                    await asyncio.sleep(0.2)

    def served_since(since):
        return sum(began > since and error is None for began, _, error in outcomes) >= STREAMS

    async def all_are_served():
        since = time.monotonic()
        await until(lambda: served_since(since), BACK_S)

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    try:
        await all_are_served()
        yield all_are_served
    finally:
        enough.set()
        await asyncio.gather(*streams)


async def all_healthy(stack):
    for service in SERVICES:
        for container in stack.containers(service):
            await until(partial(asyncio.to_thread, container.is_healthy), BACK_S)


@pytest.mark.parametrize(
    "what", ["bytes", *(pytest.param(what, marks=pytest.mark.full) for what in ("inodes", "read-only"))]
)
async def test_streams_go_on_beside_full_volumes_and_all_returns(disk_and_stack, what):
    disk, stack = disk_and_stack
    outcomes, away = [], []
    async with streaming(stack, outcomes) as all_are_served:
        await asyncio.to_thread(disk.fill, what)
        full = time.monotonic()
        await asyncio.sleep(SECONDS)
        for service in ("predictor", "logger", "transformer"):
            began = time.monotonic()
            returned = stack.containers(service)[0].kill_9()
            if service == "logger":
                await asyncio.sleep(SECONDS)  # It returns when there is room.
            else:
                await until(returned, BACK_S)
            if service == "transformer":
                await until(lambda: serves(stack.gateway, "ready"), BACK_S)
                away.append((began, time.monotonic() + 1))  # Each caller's connection needs a moment.
            await all_are_served()
        await asyncio.to_thread(disk.empty, what)
        if what == "read-only":  # A container keeps the volume that it has been given.
            began = time.monotonic()
            await until(stack.container("transformer").kill_9(), BACK_S)
            await until(lambda: serves(stack.gateway, "ready"), BACK_S)
            away.append((began, time.monotonic() + 1))
        await all_are_served()
    print(f"{what}: {Counter(str(error)[:80] for *_, error in outcomes)}")
    lost = [
        error
        for began, ended, error in outcomes
        if error is not None and not any(began < until_s and ended > since_s for since_s, until_s in away)
    ]
    assert not lost
    assert any(began > full for began, *_ in outcomes)
    await all_healthy(stack)


async def test_more_callers_than_descriptors_are_nobody_elses_trouble(disk_and_stack):
    _, stack = disk_and_stack
    outcomes = []
    host, _, port = stack.gateway.rpartition(":")
    async with streaming(stack, outcomes) as all_are_served:
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2 * DESCRIPTORS)]
        await asyncio.sleep(SECONDS)
        await all_are_served()
        for _, writer in idle:
            writer.close()
    assert not [error for *_, error in outcomes if error is not None]
    await all_healthy(stack)
    assert f"only {DESCRIPTORS} open files and connections are allowed" in stack.compose("logs", "envoy")


async def test_a_predictor_without_memory_is_nobody_elses_trouble(disk_and_stack):
    _, stack = disk_and_stack
    outcomes = []
    poor, _ = stack.containers("predictor")
    before = poor.facts["HostConfig"]["Memory"]
    async with streaming(stack, outcomes) as all_are_served:
        poor.kill_9()
        await until(partial(asyncio.to_thread, poor.limit_memory, LITTLE_MEMORY), BACK_S)
        limited = time.monotonic()
        while time.monotonic() < limited + 3 * SECONDS:
            await all_are_served()
        assert not await asyncio.to_thread(poor.is_healthy)
        assert await asyncio.to_thread(poor.limit_memory, before)
        await all_healthy(stack)
        await all_are_served()
    assert not [error for *_, error in outcomes if error is not None]
