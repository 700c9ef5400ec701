"""The logger as a process with a sink: after a kill it continues sending, and a wrong sink is refused at the start."""

import uuid

import grpc
import pytest

from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord
from tests.process.sink_server import SinkServer
from tests.support.logger_process import LoggerProcess
from tests.waiting import until

SOURCE = str(uuid.uuid4())
COUNT = 300


def append_request(number):
    record = PayloadRecord(record_id=str(uuid.UUID(int=number)), status="OK", prompt="p", text="t")
    record.time.GetCurrentTime()
    return AppendRequest(source=SOURCE, sequence=number, record=record)


@pytest.fixture
async def server():
    server = SinkServer()
    await server.start()
    yield server
    await server.kill()


async def append(target, numbers):
    async with grpc.aio.insecure_channel(target) as channel:
        call = headrace_pb2_grpc.PayloadIngestStub(channel).Append(map(append_request, numbers))
        assert [response.sequence async for response in call][-1] == numbers[-1]


async def test_a_logger_that_is_killed_sends_every_event(server, tmp_path):
    keys = {(f"/log/{part}", str(uuid.UUID(int=n))) for n in range(1, COUNT + 1) for part in ("request", "response")}
    async with LoggerProcess(tmp_path) as process:
        process.environment |= {"LOGGER_SINKS": server.url, "LOGGER_SINK_SOURCE": "/log"}
        await process.start()
        await append(process.target, range(1, 101))
        await until(lambda: len(server.taken) >= 30)
        await process.kill()
        await process.start()
        # Now the sink is away while records arrive and when the logger is killed.
        await server.kill()
        await append(process.target, range(101, COUNT + 1))
        await process.kill()
        await server.start()
        await process.start()
        await until(lambda: set(server.keys) == keys)
    assert set(server.keys) == keys


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("ftp://127.0.0.1/", "LOGGER_SINKS=ftp://127.0.0.1/: must be a URL such as http://127.0.0.1:4318"),
        ("http://a/,here", "LOGGER_SINKS=here: must be a URL such as http://127.0.0.1:4318"),
        ("http://a/x,http://u:secret@a/x", "LOGGER_SINKS: http://a/x is listed twice; remove one"),
    ],
)
async def test_a_wrong_sink_is_refused_in_one_line(tmp_path, sinks, message):
    process = LoggerProcess(tmp_path)
    process.environment |= {"LOGGER_SINKS": sinks}
    assert await process.refuses() == f"logger: {message}\n"
