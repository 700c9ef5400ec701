"""Full and read-only volumes under eight streams, with `kill -9` of each service: all returns by itself."""

import asyncio
import os
import time

import pytest
import pytest_asyncio

from tests.containers.calls import channel, generate
from tests.containers.stack import FILES, ComposeStack
from tests.support.full import FULL
from tests.support.small_disk import small_disk
from tests.waiting import until

STREAMS, TOKENS = 8, 40
SECONDS = 20 if FULL else 3
BACK_S = 180.0  # The engine restarts a container after a minute at most.
VOLUMES = ("payloads", "spool", "predictor-spool", "batches", "routes")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")


@pytest_asyncio.fixture(scope="module")
async def disk_and_stack(built, tmp_path_factory):
    """A stack whose volumes are folders of one small disk."""
    folder = tmp_path_factory.mktemp("full")
    with small_disk(folder / "disk", megabytes=16, inodes=400) as disk:
        disk.path.chmod(0o777)
        lines = ["volumes:"]
        for name in VOLUMES:
            (disk.path / name).mkdir(mode=0o777)
            (disk.path / name).chmod(0o777)
            options = f"{{type: none, o: bind, device: {disk.path / name}}}"
            lines.append(f"  {name}: {{driver: local, driver_opts: {options}}}")
        overlay = folder / "small.yaml"
        overlay.write_text("\n".join(lines) + "\n")
        stack = ComposeStack(folder / "wheels", (*FILES, str(overlay)), "millrace-full")
        (folder / "wheels").mkdir()
        try:
            stack.compose("up", "--wait", "--no-build", "transformer", "predictor", "logger", "envoy")
            yield disk, stack
        finally:
            stack.compose("down", "--volumes", "--remove-orphans")


@pytest.mark.parametrize("what", ["bytes", *(pytest.param(what, marks=pytest.mark.full) for what in ("inodes",))])
async def test_streams_go_on_beside_full_volumes_and_all_returns(disk_and_stack, what):
    disk, stack = disk_and_stack
    outcomes, enough = [], asyncio.Event()

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

    def served(since):
        return sum(began > since and error is None for began, _, error in outcomes) >= STREAMS

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    try:
        await until(lambda: served(0), BACK_S)
        await asyncio.to_thread(disk.fill, what)
        full = time.monotonic()
        await asyncio.sleep(SECONDS)
        away = []
        for service in ("predictor", "logger", "transformer"):
            began = time.monotonic()
            returned = stack.container(service).kill_9()
            if service == "logger":
                await asyncio.sleep(SECONDS)  # It returns when there is room.
            else:
                await until(returned, BACK_S)
            if service == "transformer":
                away.append((began, time.monotonic()))
            since = time.monotonic()
            await until(lambda: served(since), BACK_S)  # noqa: B023
        await asyncio.to_thread(disk.empty, what)
        since = time.monotonic()
        await until(lambda: served(since), BACK_S)
    finally:
        enough.set()
        await asyncio.gather(*streams)
    lost = [
        error
        for began, ended, error in outcomes
        if error is not None and not any(began < until_s and ended > since_s for since_s, until_s in away)
    ]
    assert not lost
    assert any(began > full for began, *_ in outcomes)
    for service in ("transformer", "predictor", "logger"):

        async def healthy(service=service):
            facts = await asyncio.to_thread(lambda: stack.container(service).facts)
            return facts["State"]["Running"] and facts["State"]["Health"]["Status"] == "healthy"

        await until(healthy, BACK_S)
