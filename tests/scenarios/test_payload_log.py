"""The payload log neither loses nor doubles a record, whichever process dies; and the streams go on."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.full import FULL
from tests.support.logger_process import free_port
from tests.system.calls import channel, rest
from tests.waiting import until

REQUESTS = 20_000 if FULL else 300
AT_ONCE = 16
SEED = int(os.environ.get("SEED", random.randrange(1 << 32)))
MAX_GROWTH = 48 << 20
SINK = Path(__file__).with_name("event_sink.py")


class EventSink:
    """A sink in its own process; its port and file outlive it."""

    def __init__(self, folder):
        self.file = folder / "events"
        self.file.touch()
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self):
        self._process = subprocess.Popen((sys.executable, str(SINK), str(self._port), str(self.file)))

    def kill(self):
        self._process.kill()
        self._process.wait()

    def events(self):
        """The count of each (type, id)."""
        return Counter(tuple(line.split("\t")) for line in self.file.read_text().splitlines())


@pytest.fixture
def sink(tmp_path):
    started = EventSink(tmp_path)
    yield started
    started.kill()


def stored(stack):
    """The (status, record_id) of each request_id's records, without those of the gateway."""
    with sqlite3.connect(f"file:{stack.settings.run_folder}/payloads.sqlite3?mode=ro", uri=True) as connection:
        found = {}
        for request_id, status, record_id in connection.execute(
            "SELECT request_id, status, record_id FROM records WHERE NOT of_call"
        ):
            found.setdefault(request_id, []).append((status, record_id))
        return found


async def one_request(stack, dice, name):
    """A request of some kind; returns the status that its record must have, None if either is possible."""
    kind = dice.choice(("stream", "stream", "sse", "cancelled", "refused", "unknown"))
    story = {"model": "storyteller", "prompt": "Once", "max_tokens": dice.randrange(1, 12), "ignore_eos": True}
    if kind == "sse":
        answer = await rest(stack.gateway, "POST", "/v1/completions", {**story, "stream": True}, x_request_id=name)
        assert answer.events[-1] == "[DONE]"
        return "OK"
    if kind == "refused":
        story["temperature"] = -1
    if kind == "unknown":
        story["model"] = "nobody"
    if kind == "cancelled":
        story["max_tokens"] = 1000
    async with channel(stack.gateway) as open_channel:
        stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
        call = stub.Generate(headrace_pb2.GenerateRequest(**story, request_id=name), timeout=60)
        try:
            async for _ in call:
                if kind == "cancelled":
                    call.cancel()
        except asyncio.CancelledError:
            return "CANCELLED"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


@pytest.mark.timeout(900)
async def test_every_record_is_kept_once_while_logger_and_sink_die(new_stack, sink):
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    stack = await new_stack(models="storyteller=models/storyteller", environment={"logger": {"LOGGER_SINKS": sink.url}})

    async def kill_for_ever():
        while True:
            await asyncio.sleep(dice.uniform(0.3, 1.5))
            if dice.random() < 0.5:
                with suppress(ProcessLookupError):
                    await stack.kill("logger")
            else:
                sink.kill()
                await asyncio.sleep(dice.uniform(0, 1))
                sink.start()

    expected = {}
    numbers = iter(range(REQUESTS))
    memory = {name: [] for name in stack.names}

    async def client():
        for number in numbers:
            expected[f"request-{number}"] = await one_request(stack, dice, f"request-{number}")
            if number % (REQUESTS // 20) == 0:
                for name, samples in memory.items():
                    with suppress(ProcessLookupError, psutil.NoSuchProcess):  # The logger between two lives.
                        samples.append(psutil.Process(stack.pid(name)).memory_info().rss)

    killer = asyncio.create_task(kill_for_ever())
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    killer.cancel()
    await asyncio.gather(killer, return_exceptions=True)
    sink.kill()
    sink.start()

    async def all_are_stored():
        return len(stored(stack)) >= REQUESTS

    await until(all_are_stored, timeout_s=120)
    kept = stored(stack)
    assert set(kept) == set(expected)
    assert all(len(records) == 1 for records in kept.values()), "a record is there twice"
    assert {name: records[0][0] for name, records in kept.items()} == expected
    # After the first quarter, during which allocators fill their pools.
    growth = {name: max(samples) - max(samples[: len(samples) // 4]) for name, samples in memory.items()}
    assert all(bytes_more < MAX_GROWTH for bytes_more in growth.values()), growth

    record_ids = {record_id for records in kept.values() for _, record_id in records}

    kinds = ("request", "response")
    events = {(f"org.kubeflow.serving.inference.{kind}", record_id) for kind in kinds for record_id in record_ids}
    await until(lambda: set(sink.events()) >= events, timeout_s=120)
    assert set(sink.events()) == events
