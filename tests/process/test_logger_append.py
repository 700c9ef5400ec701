"""The logger as a process: an acknowledged record is committed, survives kill -9, and is stored once."""

import asyncio
import signal
import sqlite3
import time
import uuid

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest
from tests.support.logger_process import LoggerProcess

SOURCE = str(uuid.uuid4())
BEGUN_MS = time.time_ns() // 1_000_000


def append_request(sequence, source=SOURCE):
    record_id = str(uuid.uuid5(uuid.UUID(int=0), f"{source}/{sequence}"))
    record = PayloadRecord(record_id=record_id, model="m", request_id=str(sequence))
    record.time.FromMilliseconds(BEGUN_MS + sequence)
    return AppendRequest(source=source, sequence=sequence, record=record)


def committed(database):
    """The (source, sequence) pairs of the committed records, as another process sees them."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT request_id FROM records").fetchall()
    connection.close()
    return [(SOURCE, int(request_id)) for (request_id,) in rows]


@pytest.fixture
async def logger(tmp_path):
    async with LoggerProcess(tmp_path) as process:
        await process.start()
        yield process


@pytest.fixture
async def channel(logger):
    async with grpc.aio.insecure_channel(logger.target) as channel:
        yield channel


async def test_an_acknowledged_record_is_committed(logger, channel):
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append()
    for sequence in range(1, 21):
        await call.write(append_request(sequence))
        assert (await call.read()).sequence == sequence
        assert (SOURCE, sequence) in committed(logger.database)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_requests_that_arrive_together_are_acknowledged_together(channel):
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append(append_request(n) for n in range(1, 2001))
    acknowledged = [response.sequence async for response in call]
    assert acknowledged[-1] == 2000
    assert acknowledged == sorted(set(acknowledged))
    assert len(acknowledged) < 1000


async def test_the_requests_of_one_message_are_committed_and_acknowledged_together(logger, channel):
    message = append_request(1)
    message.more.extend(append_request(number) for number in range(2, 101))
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append(iter([message, append_request(101)]))
    acknowledged = [response.sequence async for response in call]
    assert acknowledged[-1] == 101
    assert set(acknowledged) <= {100, 101}
    assert sorted(committed(logger.database)) == [(SOURCE, number) for number in range(1, 102)]


async def test_a_message_with_a_request_without_a_key_is_refused(channel):
    message = append_request(1)
    message.more.add(sequence=2)
    with pytest.raises(grpc.aio.AioRpcError, match="without a source"):
        async for _ in headrace_pb2_grpc.PayloadIngestStub(channel).Append(iter([message])):
            pass


async def test_sending_again_is_acknowledged_and_stores_nothing(logger, channel):
    stub = headrace_pb2_grpc.PayloadIngestStub(channel)
    for _ in range(2):
        last = [response.sequence async for response in stub.Append(append_request(n) for n in range(1, 11))][-1]
        assert last == 10
    assert sorted(committed(logger.database)) == [(SOURCE, n) for n in range(1, 11)]


async def test_kill_9_loses_nothing_acknowledged_and_a_resend_doubles_nothing(logger, channel):
    stub = headrace_pb2_grpc.PayloadIngestStub(channel)
    sequences = iter(range(1, 1_000_000))
    acknowledged = 0
    call = stub.Append(append_request(n) for n in sequences)
    while acknowledged <= 300:
        acknowledged = (await call.read()).sequence
    await logger.kill()
    assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    await logger.start()
    survived = committed(logger.database)
    assert {(SOURCE, n) for n in range(1, acknowledged + 1)} <= set(survived)
    last = max(next(sequences), acknowledged + 100)
    again = stub.Append((append_request(n) for n in range(acknowledged - 50, last + 1)), wait_for_ready=True)
    assert [response.sequence async for response in again][-1] == last
    assert sorted(committed(logger.database)) == [(SOURCE, n) for n in range(1, last + 1)]


async def test_sigterm_commits_received_requests_ends_the_open_call_and_exits_0(logger, channel):
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append()
    for sequence in range(1, 101):
        await call.write(append_request(sequence))
    assert (await call.read()).sequence >= 1
    logger.send(signal.SIGTERM)
    acknowledged = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        acknowledged = response.sequence
    assert await call.code() is grpc.StatusCode.OK
    assert await logger.wait() == 0
    assert sorted(committed(logger.database))[-1] >= (SOURCE, acknowledged)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (AppendRequest(sequence=1), "without a source"),
        (AppendRequest(source="s"), "sequence 0"),
        (AppendRequest(source="s", sequence=2**64 - 1), "sequence 18446744073709551615"),
        (AppendRequest(source="s", sequence=1), "record_id ''"),
        (AppendRequest(source="s", sequence=1, record=PayloadRecord(record_id="x" * 36)), "record_id 'xxx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_request_without_a_key_is_refused_after_those_before_it(logger, channel, request_, text):
    stub = headrace_pb2_grpc.PayloadIngestStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
        async for _ in stub.Append(iter([append_request(1), request_])):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert committed(logger.database) == [(SOURCE, 1)]


async def test_an_unusable_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "payloads.sqlite3").mkdir()
    process = await asyncio.create_subprocess_exec(
        *LoggerProcess.COMMAND,
        cwd=LoggerProcess.ROOT,
        env=LoggerProcess(tmp_path).environment,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 78
    assert stderr.decode() == f"logger: LOGGER_DATABASE={tmp_path}/payloads.sqlite3: Is a directory\n"


async def test_reflection_lists_the_payload_log_and_not_its_ingest(channel):
    stub = ServerReflectionStub(channel)
    async for response in stub.ServerReflectionInfo(iter([ServerReflectionRequest(list_services="*")])):
        names = {service.name for service in response.list_services_response.service}
    assert "headrace.v1.PayloadLog" in names
    assert "headrace.v1.PayloadIngest" not in names


@pytest.mark.parametrize("name", ["", "headrace.v1.PayloadLog"])
async def test_health_is_serving_when_the_store_answers(channel, name):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_appended_records_can_be_queried_over_grpc(channel):
    stub = headrace_pb2_grpc.PayloadIngestStub(channel)
    async for _ in stub.Append(append_request(n) for n in range(1, 301)):
        pass
    query = headrace_pb2_grpc.PayloadLogStub(channel).Query(QueryPayloadsRequest(model="m", page_size=1000))
    ids = [record.record_id async for record in query]
    assert ids == [append_request(n).record.record_id for n in range(300, 0, -1)]
