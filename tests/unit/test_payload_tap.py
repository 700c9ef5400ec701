"""The payload tap: never in the stream's way, bounded, and what it ships arrives once and in order."""

import asyncio
import logging
import signal
import uuid
from collections import deque
from contextlib import suppress

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import OverloadedError
from millrace.payload_tap import FAILED, FULL, TOO_LARGE, PayloadTap
from millrace.protos import millrace_pb2_grpc
from millrace.protos.millrace_pb2 import AppendRequest, AppendResponse, QueryPayloadsRequest, Usage
from millrace.uuid7 import as_uuid7, next_id
from tests.unit.logger_process import LoggerProcess, free_port


class Ingest(millrace_pb2_grpc.PayloadIngestServicer):
    """Takes records; acknowledges each while `acknowledging`, ends the call after `end_after` of them."""

    def __init__(self):
        self.calls = []
        self.acknowledging = True
        self.end_after = None
        self.changed = asyncio.Condition()

    async def Append(self, request_iterator, context):  # noqa: N802
        received = []
        self.calls.append(received)
        async for request in request_iterator:
            async with self.changed:
                received.append(request)
                self.changed.notify_all()
            if self.end_after is not None and len(received) > self.end_after:
                return
            if self.acknowledging:
                yield AppendResponse(sequence=request.sequence)

    async def until(self, condition):
        async with self.changed, asyncio.timeout(30):
            await self.changed.wait_for(condition)


@pytest.fixture
async def ingest():
    """An ingest that listens at `ingest.target`."""
    servicer = Ingest()
    server = grpc.aio.server()
    millrace_pb2_grpc.add_PayloadIngestServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
async def shipping():
    """Starts `ship` of a tap, ended after the test."""
    tasks = []
    yield lambda tap: tasks.append(asyncio.create_task(tap.ship()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def offline():
    return PayloadTap(f"127.0.0.1:{free_port()}")


def begin(tap, request_id="r", **fields):
    return tap.begin(request_id=request_id, model="m", protocol="p", **fields)


def queued(tap):
    """What would be sent, which has no public door before it is."""
    return [AppendRequest.FromString(item.request) for item in tap._queue]


async def test_a_record_holds_what_was_recorded():
    tap = offline()
    recording = tap.begin(
        request_id="r", model="m", protocol="millrace.v1.TextGeneration/Generate", prompt="p", parameters="{}",
        trace_id="t",
    )  # fmt: skip
    recording.chunk("", [])
    recording.chunk("Once ", [5, 6])
    recording.chunk("upon", [7])
    recording.end("OK", finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=3))
    [request] = queued(tap)
    record = request.record
    assert (record.request_id, record.model, record.prompt, record.parameters, record.trace_id) == (
        "r", "m", "p", "{}", "t",
    )  # fmt: skip
    assert record.protocol == "millrace.v1.TextGeneration/Generate"
    assert (record.status, record.finish_reason, record.text) == ("OK", "stop", "Once upon")
    assert [(chunk.text, list(chunk.token_ids)) for chunk in record.chunks] == [
        ("", []), ("Once ", [5, 6]), ("upon", [7]),
    ]  # fmt: skip
    assert record.usage.completion_tokens == 3
    offsets = [chunk.offset_ms for chunk in record.chunks]
    assert offsets == sorted(offsets)
    assert record.ttft_ms == offsets[1], "the first token is in the first chunk with token ids"
    assert record.duration_ms >= offsets[-1]
    assert record.time.nanos % 1000 == 0, "the store keeps microseconds"


async def test_the_whole_answer_can_be_given_at_the_end():
    tap = offline()
    begin(tap).end("OK", text="whole")
    [request] = queued(tap)
    assert request.record.text == "whole"
    assert not request.record.HasField("ttft_ms")


async def test_only_the_first_end_counts():
    tap = offline()
    with begin(tap) as recording:
        recording.end("OK")
        recording.end("INTERNAL")
        recording.chunk("late", [1])
    [request] = queued(tap)
    assert request.record.status == "OK"
    assert not request.record.chunks


@pytest.mark.parametrize(
    ("error", "status", "message", "hop"),
    [
        (None, "CANCELLED", "aborted", ""),
        (asyncio.CancelledError(), "CANCELLED", "aborted", ""),
        (GeneratorExit(), "CANCELLED", "aborted", ""),
        (OverloadedError("full", hop="predictor"), "RESOURCE_EXHAUSTED", "full", "predictor"),
        (OverloadedError("full"), "RESOURCE_EXHAUSTED", "full", "transformer"),
        (RuntimeError("secret"), "INTERNAL", "internal error", "transformer"),
    ],
    ids=repr,
)
async def test_a_block_left_without_an_end_ends_its_record(error, status, message, hop):
    tap = offline()
    with suppress(BaseException), begin(tap):
        if error is not None:
            raise error
    [request] = queued(tap)
    assert (request.record.status, request.record.message, request.record.failed_hop) == (status, message, hop)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda recording: recording.chunk(None, [1]),
        lambda recording: recording.chunk("x", None),
        lambda recording: recording.chunk("x", ["a"]),
        lambda recording: recording.chunk("x", [2**40]),
        lambda recording: setattr(recording, "prompt", object()),
        lambda recording: recording.end(7),
        lambda recording: recording.end("OK", usage="no usage"),
        lambda recording: recording.end("OK", text=b"bytes"),
    ],
)
async def test_misuse_is_counted_and_never_raised(misuse):
    tap = offline()
    with begin(tap) as recording:
        misuse(recording)
    assert tap.dropped == {FAILED: 1}
    assert not queued(tap)


async def test_half_a_surrogate_pair_is_replaced():
    tap = offline()
    with begin(tap, prompt="a\ud800", parameters='"\udfff"') as recording:
        recording.chunk("b\ud800", [1])
        recording.end("OK")
    [request] = queued(tap)
    assert (request.record.prompt, request.record.parameters, request.record.text) == ("a?", '"?"', "b?")


async def test_beyond_its_capacity_it_drops_counts_and_leaves_no_gap():
    tap = PayloadTap(f"127.0.0.1:{free_port()}", capacity_bytes=10_000)
    for _ in range(100):
        begin(tap, prompt="x" * 400).end("OK")
    kept = queued(tap)
    assert tap.queued_bytes <= 10_000
    assert tap.queued_bytes == sum(len(request.SerializeToString()) for request in kept)
    assert tap.dropped == {FULL: 100 - len(kept)}
    begin(tap).end("OK")
    assert [request.sequence for request in queued(tap)] == list(range(1, len(kept) + 2))


async def test_a_record_beyond_the_message_limit_is_dropped_and_not_sent_for_ever():
    tap = PayloadTap("127.0.0.1:1", capacity_bytes=1 << 40)
    begin(tap, prompt="x" * (64 << 20)).end("OK")
    assert tap.dropped == {TOO_LARGE: 1}
    assert tap.queued_bytes == 0


async def test_it_warns_of_drops_once_a_minute(caplog):
    tap = PayloadTap("127.0.0.1:1", capacity_bytes=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            begin(tap).end("OK")
    assert [record.getMessage() for record in caplog.records] == ["payload record dropped: full (1 so far)"]


async def test_what_is_acknowledged_is_forgotten(ingest, shipping):
    tap = PayloadTap(ingest.target)
    for number in range(1000):
        begin(tap, f"r{number}").end("OK")
    shipping(tap)
    assert await tap.drain(30)
    assert (tap.queued_bytes, tap.dropped) == (0, {})
    [received] = ingest.calls
    assert [request.record.request_id for request in received] == [f"r{number}" for number in range(1000)]
    assert [request.sequence for request in received] == list(range(1, 1001))


async def test_a_record_leaves_when_it_ends_without_another_push(ingest, shipping):
    tap = PayloadTap(ingest.target)
    shipping(tap)
    for number in range(1, 4):
        begin(tap).end("OK")
        await ingest.until(lambda number=number: ingest.calls and len(ingest.calls[-1]) == number)


async def test_what_was_not_acknowledged_is_sent_again_the_same(ingest, shipping):
    tap = PayloadTap(ingest.target)
    ingest.end_after = 30
    for _ in range(100):
        begin(tap).end("OK")
    shipping(tap)
    await ingest.until(lambda: len(ingest.calls) >= 3)
    ingest.end_after = None
    assert await tap.drain(30)
    received = [request for call in ingest.calls for request in call]
    by_sequence = {request.sequence: request for request in received}
    assert sorted(by_sequence) == list(range(1, 101))
    assert all(request == by_sequence[request.sequence] for request in received)
    for call in ingest.calls:
        sequences = [request.sequence for request in call]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


async def test_in_flight_is_bounded(ingest, shipping):
    ingest.acknowledging = False
    tap = PayloadTap(ingest.target)
    for _ in range(1000):
        begin(tap).end("OK")
    shipping(tap)
    await ingest.until(lambda: ingest.calls and len(ingest.calls[0]) == 256)
    assert not await tap.drain(0.2)
    assert len(ingest.calls[0]) == 256


async def test_shipping_ends_when_it_is_cancelled_whatever_it_is_doing(ingest):
    ingest.end_after = 0  # So that calls end, and new ones begin, all the time.
    for moment in range(150):
        tap = PayloadTap(ingest.target)
        begin(tap).end("OK")
        task = asyncio.create_task(tap.ship())
        calls = len(ingest.calls)
        await ingest.until(lambda calls=calls: len(ingest.calls) > calls)
        for _ in range(moment % 30):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=10)
        assert done, moment


async def test_drain_ships_by_itself_and_gives_up_in_time(ingest):
    tap = PayloadTap(ingest.target)
    begin(tap).end("OK")
    assert await tap.drain(30)
    away = offline()
    assert await away.drain(0)
    begin(away).end("OK")
    assert not await away.drain(0.05)


async def test_a_logger_killed_and_restarted_has_every_record_once(tmp_path, shipping):
    count = 600
    with LoggerProcess(tmp_path) as logger:
        tap = PayloadTap(logger.target)
        shipping(tap)
        await logger.start()
        for number in range(count):
            with begin(tap, f"r{number}") as recording:
                recording.chunk("text", [1, 2, 3])
                recording.end("OK")
            await asyncio.sleep(0)
            if number in (200, 400):
                logger.kill()
            if number in (300, 500):
                await logger.start()
        assert await tap.drain(60)
        async with grpc.aio.insecure_channel(logger.target) as channel:
            query = millrace_pb2_grpc.PayloadLogStub(channel).Query(QueryPayloadsRequest(page_size=1000))
            stored = deque([record.request_id async for record in query])
    assert list(reversed(stored)) == [f"r{number}" for number in range(count)]
    assert tap.dropped == {}


async def test_a_logger_that_is_stopped_for_a_while_gets_all_afterwards(tmp_path, shipping):
    with LoggerProcess(tmp_path) as logger:
        await logger.start()
        tap = PayloadTap(logger.target)
        shipping(tap)
        begin(tap).end("OK")
        assert await tap.drain(30)
        logger.send(signal.SIGSTOP)
        for _ in range(1000):
            begin(tap, prompt="x" * 1000).end("OK")
        assert not await tap.drain(0.2)
        logger.send(signal.SIGCONT)
        assert await tap.drain(60)
        async with grpc.aio.insecure_channel(logger.target) as channel:
            filters = QueryPayloadsRequest(text_contains="x", page_size=1000)
            assert len([record async for record in millrace_pb2_grpc.PayloadLogStub(channel).Query(filters)]) == 1000


@given(st.lists(st.integers(0, 2**48 - 2), min_size=1))
def test_record_ids_grow_whatever_the_clock_does(clock):
    value, ids = 0, []
    for now_ms in clock:
        value = next_id(now_ms, value)
        ids.append(as_uuid7(value))
    assert all(made.version == 7 and made.variant == uuid.RFC_4122 for made in ids)
    assert [str(made) for made in ids] == sorted({str(made) for made in ids})
    assert ids[0].int >> 80 == clock[0]


def test_a_record_id_is_laid_out_as_in_the_rfc():
    # RFC 9562, appendix A.6.
    value = 0x017F22E279B0 << 74 | 0xCC3 << 62 | 0x18C4DC0C0C07398F
    assert str(as_uuid7(value)) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"
