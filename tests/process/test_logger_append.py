"""The logger as a process: an acknowledged record is committed, survives kill -9 and a database that dies, once."""

import asyncio
import contextlib
import signal
import sqlite3
import sys
import time
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from headrace.errors import HopBrokenError, NotReadyError, StartupError
from headrace.rpc.client.channel import open_channel
from headrace_logger.backup import main as copy
from headrace_logger.export.export import main as export
from headrace_logger.store import tables, writing
from headrace_logger.store.filters import Filters
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest
from tests.process.sink_server import SinkServer
from tests.support import postgresql as postgresql_server
from tests.support.logger_process import LoggerProcess
from tests.support.payload_ingest import begin
from tests.support.payload_records import SOURCE, answered, append_request, append_to, following, numbers, record_id
from tests.support.status import refusal
from tests.waiting import until

BEGUN_MS = time.time_ns() // 1_000_000


def sent(sequence):
    return append_request(sequence, time_ns=(BEGUN_MS + sequence) * 10**6, model="m", request_id=str(sequence))


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
        await call.write(sent(sequence))
        assert (await call.read()).sequence == sequence
        assert (SOURCE, sequence) in committed(logger.database)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_the_requests_of_one_message_are_committed_and_acknowledged_together(logger, channel):
    message = sent(1)
    message.more.extend(sent(number) for number in range(2, 101))
    acknowledged = await append_to(channel, [message, sent(101)])
    assert acknowledged[-1] == 101
    assert set(acknowledged) <= {100, 101}
    assert sorted(committed(logger.database)) == [(SOURCE, number) for number in range(1, 102)]


async def test_kill_9_loses_nothing_acknowledged_and_a_resend_doubles_nothing(logger, channel):
    stub = headrace_pb2_grpc.PayloadIngestStub(channel)
    sequences = iter(range(1, 1_000_000))
    acknowledged = 0
    call = stub.Append(sent(n) for n in sequences)
    while acknowledged <= 300:
        acknowledged = (await call.read()).sequence
    await logger.kill()
    assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    await logger.start()
    survived = committed(logger.database)
    assert {(SOURCE, n) for n in range(1, acknowledged + 1)} <= set(survived)
    last = max(next(sequences), acknowledged + 100)
    again = stub.Append((sent(n) for n in range(acknowledged - 50, last + 1)), wait_for_ready=True)
    assert [response.sequence async for response in again][-1] == last
    assert sorted(committed(logger.database)) == [(SOURCE, n) for n in range(1, last + 1)]


async def test_sigterm_commits_received_requests_ends_the_open_call_and_exits_0(logger, channel):
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append()
    for sequence in range(1, 101):
        await call.write(sent(sequence))
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
        (AppendRequest(source="s", sequence=2**64 - 1), "sequence 18446744073709551615"),
        (AppendRequest(source="s", sequence=1, record=PayloadRecord(record_id="x" * 36)), "record_id 'xxx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_request_without_a_key_is_refused_after_those_before_it(logger, channel, request_, text):
    caught = await refusal(append_to(channel, [sent(1), request_]), text)
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert committed(logger.database) == [(SOURCE, 1)]


async def test_an_unusable_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "payloads.sqlite3").mkdir()
    refusal = await LoggerProcess(tmp_path).refuses()
    assert refusal == f"logger: LOGGER_DATABASE={tmp_path}/payloads.sqlite3: Is a directory\n"


SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def mortal_postgresql():
    """A server of this test alone, which may stop it."""
    with postgresql_server.running() as server:
        yield server


@pytest.fixture
async def logger_on_postgresql(tmp_path, mortal_postgresql):
    async with LoggerProcess(tmp_path) as process:
        process.environment["LOGGER_DATABASE_URL"] = mortal_postgresql.database()
        yield process


@pytest.fixture
async def stores(postgresql):
    """Makes stores of one database, as several loggers have them."""
    url = SecretStr(postgresql.database())
    async with contextlib.AsyncExitStack() as closing:

        async def make():
            store = await asyncio.to_thread(Store, url)
            closing.push_async_callback(store.close)
            return store

        yield make


async def health(target):
    """The logger's health now; None if it does not answer."""
    async with open_channel(target, "logger") as channel:
        request = health_pb2.HealthCheckRequest(service="headrace.v1.PayloadLog")
        try:
            return (await health_pb2_grpc.HealthStub(channel).Check(request)).status
        except NotReadyError:
            return None


async def request_ids(target):
    """How often the log has a record of each request."""
    found = Counter()
    async with open_channel(target, "logger") as channel:
        token = ""
        while True:
            request = QueryPayloadsRequest(page_size=1000, page_token=token)
            page = [one async for one in headrace_pb2_grpc.PayloadLogStub(channel).Query(request)]
            found.update(one.request_id for one in page)
            if len(page) < 1000:
                return found
            token = page[-1].page_token


@pytest.mark.parametrize(("count", "away_s"), [(200, 3), pytest.param(2000, 20, marks=pytest.mark.full)])
async def test_each_request_has_one_record_though_the_database_was_away(
    logger_on_postgresql, mortal_postgresql, taps, count, away_s
):
    logger = logger_on_postgresql
    await logger.start()
    tap = taps.start(logger.target)

    async def ask(numbers, apart_s=0.005):
        for number in numbers:
            record = begin(tap, f"request-{number}")
            await asyncio.sleep(apart_s)
            record.end("OK")

    before, during = asyncio.create_task(ask(range(count // 2))), None
    await until(lambda: request_ids(logger.target), holds=lambda found: "request-0" in found)
    mortal_postgresql.stop("immediate")
    during = asyncio.create_task(ask(range(count // 2, count), away_s / count))
    await until(lambda: health(logger.target), holds=lambda status: status != SERVING)
    await asyncio.sleep(away_s)
    # The logger dies too, with what it holds; its successor starts without the database.
    await logger.kill()
    await logger.spawn()
    await until(
        lambda: health(logger.target), holds=lambda status: status == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    mortal_postgresql.start()
    await asyncio.gather(before, during)
    await until(lambda: health(logger.target), holds=lambda status: status == SERVING)
    await until(lambda: request_ids(logger.target), holds=lambda found: len(found) == count)
    assert set((await request_ids(logger.target)).values()) == {1}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda url, _: url.replace("geheim", "wrong"), "password authentication failed"),
        (lambda _, server: server.database("ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"), "encoding LATIN1"),
        (lambda url, server: newer(url, server), "schema version 9999, this logger knows"),
        (lambda *_: "mysql://user:geheim@host/log", "not postgresql://"),
    ],
    ids=["password", "encoding", "newer", "kind"],
)
async def test_a_database_that_cannot_be_used_ends_the_start_with_one_line(tmp_path, postgresql, change, text):
    async with LoggerProcess(tmp_path) as logger:
        logger.environment["LOGGER_DATABASE_URL"] = change(postgresql.database(), postgresql)
        output = await logger.refuses()
    assert text in output
    assert output.startswith("logger: LOGGER_DATABASE_URL") or text.startswith(("encoding", "schema"))
    assert output.count("\n") == 1
    assert "geheim" not in output


def newer(url, server):
    server.execute(url, "CREATE TABLE schema_version AS SELECT 9999 AS version")
    return url


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "headrace_logger.store.postgresql", raising=False)
    with pytest.raises(StartupError, match="psycopg: install Headrace with its extra `postgres`"):
        Store(SecretStr("postgresql://127.0.0.1/log"))


async def test_loggers_that_start_together_create_the_tables_once(stores):
    first, second, third = await asyncio.gather(stores(), stores(), stores())
    await first.append([append_request(1)])
    assert await numbers(second) == await numbers(third) == [1]


async def test_what_two_loggers_receive_at_once_is_there_once_in_one_order(stores):
    loggers = [await stores(), await stores()]

    def requests(first):
        return [append_request(number, time_ns=number * 1000) for number in range(first, first + 20)]

    await asyncio.gather(*(store.append(requests(first)) for first in range(1, 182, 10) for store in loggers))
    assert await numbers(loggers[0]) == list(range(200, 0, -1))
    in_order = await loggers[1].after(0, 1000)
    assert [one.position for one in in_order] == sorted(one.position for one in in_order)
    assert len(in_order) == 200


async def test_no_reader_in_the_order_of_commit_misses_a_record_of_another_logger(stores):
    first, second, reader = [await stores() for _ in range(3)]

    def waits():
        with reader.database._reading.connect() as connection:
            return connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one()

    with first.database.begin() as connection:
        writing.append(connection, [append_request(1, source="first", client="a")], tables.now_us(), first._usage)
        later = asyncio.create_task(second.append([append_request(2, source="second", client="b")]))
        await until(lambda: later.done() or waits())
        seen = await reader.after(0, 9)
    await later
    seen += await reader.after(seen[-1].position if seen else 0, 9)
    assert len({stored.record.record_id for stored in seen}) == 2


async def test_a_deletion_at_one_logger_covers_what_arrives_late_at_another(stores):
    first, second = await stores(), await stores()
    await first.append([append_request(1, request_id="mine")])
    assert await second.delete(request_id="mine") == 1
    await first.append([append_request(2, request_id="mine"), append_request(3, request_id="other")])
    assert await numbers(first) == [3]


async def test_a_model_that_has_answered_at_one_logger_is_known_at_another(stores, postgresql):
    first, second = await stores(), await stores()
    await first.append([append_request(1, model="m", status="OK")])
    await second.append(
        [append_request(number, model=model, status="INTERNAL") for number, model in ((2, "m"), (3, "x"))]
    )
    rows = postgresql.execute(postgresql.last_url, "SELECT model, requests FROM usage ORDER BY model")
    assert rows == [("", 1), ("m", 2)]


@pytest.mark.parametrize("text", ["a\0b %s ? '", "\0" * 5000, "é" * 3000], ids=["special", "long nul", "umlauts"])
async def test_any_text_is_stored_and_found(stores, text):
    store = await stores()
    other = text[:-1] + "?"
    fields = dict.fromkeys(("model", "request_id", "trace_id", "client", "status", "finish_reason", "call_id"), text)
    await store.append([append_request(1, source=text, prompt=text, **fields), append_request(2, request_id=other)])
    assert await numbers(store, request_id=text) == [1]
    assert await numbers(store, model=text, client=text, text_contains=text) == [1]
    assert await numbers(store, request_id=other) == [2]
    assert (await anext(store.query(Filters(QueryPayloadsRequest(request_id=text)), None, 1))).record.prompt == text
    assert await store.delete(client=text) == 1
    await store.append([append_request(3, client=text)])
    assert await numbers(store) == [2]


async def test_a_restart_of_the_server_costs_no_reader_an_error(mortal_postgresql):
    store = await asyncio.to_thread(Store, SecretStr(mortal_postgresql.database()))
    await store.append([append_request(1)])
    assert await numbers(store) == [1]
    mortal_postgresql.stop("immediate")
    mortal_postgresql.start()
    assert await numbers(store) == [1]
    await store.append([append_request(1), append_request(2)])
    assert await numbers(store) == [2, 1]
    await store.close()


async def test_exports_read_the_database_of_the_settings(stores, postgresql, tmp_path, monkeypatch, capsys):
    store = await stores()
    await store.append([append_request(number, time_ns=number * 3600 * 10**9, prompt="p") for number in range(1, 6)])
    monkeypatch.setenv("LOGGER_DATABASE_URL", postgresql.last_url)
    assert await asyncio.to_thread(export, ("--format", "jsonl", "--output", str(tmp_path / "log.jsonl"))) == 0
    assert (tmp_path / "log.jsonl").read_text().count('"prompt":"p"') == 5
    assert await asyncio.to_thread(export, ("--partition", "hour", "--output", str(tmp_path / "lake"))) == 0
    assert len(list((tmp_path / "lake").rglob("*.parquet"))) == 5
    for command, tool in (("backup", "pg_dump"), ("restore", "pg_restore")):
        assert copy(command, (str(tmp_path / "copy"),)) == 1
        assert tool in capsys.readouterr().err
    monkeypatch.setenv("LOGGER_DATABASE_URL", postgresql.database())
    assert await asyncio.to_thread(export, ("--output", str(tmp_path / "none"))) == 1
    error = capsys.readouterr().err
    assert "start this logger with it once" in error
    assert "geheim" not in error


async def test_unreachable_exports_are_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOGGER_DATABASE_URL", "postgresql://u:geheim@127.0.0.1:1/log")
    assert export(("--output", str(tmp_path / "none"))) == 1
    error = capsys.readouterr().err
    assert "refused" in error
    assert error.count("\n") == 1
    assert "geheim" not in error


async def test_a_tail_shows_the_records_of_all_loggers(stores):
    first, second = await stores(), await stores()
    async with following(Tails(first)) as records:
        for number, store in enumerate((first, second, first), 1):
            await store.append([append_request(number)])
            assert (await anext(records)).record_id == record_id(number)


async def test_a_sink_gets_each_record_from_one_logger_and_another_takes_over(tmp_path, mortal_postgresql):
    server = SinkServer()
    await server.start()
    url = mortal_postgresql.database()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    async with LoggerProcess(tmp_path / "a") as first, LoggerProcess(tmp_path / "b") as second:
        for logger in (first, second):
            logger.environment |= {"LOGGER_DATABASE_URL": url, "LOGGER_SINKS": server.url}
            logger.environment["LOGGER_SINK_FROM"] = "beginning"
            await logger.start()
        try:
            await send_to(first.target, range(1, 51))
            await send_to(second.target, range(51, 101))
            await until(lambda: len(sink_ids(server)) == 100)
            assert len(server.keys) == len(set(server.keys))
            await first.kill()
            await send_to(second.target, range(101, 121))
            await until(lambda: len(sink_ids(server)) == 120)
            mortal_postgresql.stop("immediate")
            mortal_postgresql.start()
            await until(lambda: is_appended(second.target, range(121, 131)))
            await until(lambda: len(sink_ids(server)) == 130)
        finally:
            await server.kill()


async def send_to(target, sequences):
    async with open_channel(target, "logger") as channel:
        await append_to(channel, map(answered, sequences))


async def is_appended(target, sequences):
    """Sends again later, as a spool does, what a logger without its database refuses or breaks off."""
    try:
        await send_to(target, sequences)
    except (HopBrokenError, NotReadyError):
        return False
    return True


def sink_ids(server):
    return {one for _, one in server.keys}
