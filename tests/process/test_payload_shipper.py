"""Shipping: spooled records arrive at the logger once, whatever dies or is full, and then leave the disk."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from headrace.payload import shipper as payload_shipper
from headrace.payload.drops import DISK, FULL, REFUSED
from headrace.payload.parts import RecordedTensor
from headrace.payload.rules import PayloadRules
from tests.support import full
from tests.support.payload_ingest import Taps, away, begin, folders, listening, segments
from tests.support.small_disk import small_disk
from tests.waiting import HANG_S, until

ROOT = Path(__file__).parents[2]


def most(calls):
    """The number of requests in the largest call."""
    return max(map(len, calls), default=0)


async def written(tap):
    """Waits until the writer has written or dropped everything that was recorded."""
    await until(lambda: tap.queued_bytes == 0)


async def test_acknowledged_records_leave_the_disk(taps, ingest):
    tap = taps.start(ingest.target, spool_max=1 << 20)
    for number in range(1000):
        with begin(tap, f"r{number}", prompt="x" * 500) as recording:
            recording.end("OK")
        if number % 100 == 0:
            await written(tap)
    assert await tap.drain(HANG_S)
    assert (tap.queued_bytes, tap.unacknowledged, tap.dropped) == (0, 0, {})
    await until(lambda: len(segments(taps.spool)) <= 3)  # The next two too.
    [received] = ingest.calls
    assert [request.record.request_id for request in received] == [f"r{number}" for number in range(1000)]
    sequences = [request.sequence for request in received]
    assert sequences == sorted(set(sequences))
    assert {request.source for request in received} == {folder.name for folder in folders(taps.spool)}
    await taps.close(tap)
    assert not folders(taps.spool), "a stop that left nothing to send leaves nothing"


async def test_a_record_leaves_when_it_ends_without_another_push(taps, ingest):
    tap = taps.start(ingest.target)
    for number in range(1, 4):
        begin(tap).end("OK")
        await ingest.until(lambda number=number: ingest.calls and len(ingest.calls[-1]) == number)


async def test_unacknowledged_records_are_sent_again_unchanged(taps, ingest):
    tap = taps.start(ingest.target)
    ingest.end_after = 30
    for number in range(100):
        begin(tap, f"r{number}").end("OK")
    await ingest.until(lambda: len(ingest.calls) >= 3)
    ingest.end_after = None
    assert await tap.drain(HANG_S)
    assert [record.request_id for record in ingest.records] == [f"r{number}" for number in range(100)]
    for call in ingest.calls:
        sequences = [request.sequence for request in call]
        assert sequences == sorted(set(sequences))


async def test_records_are_sent_in_batches_and_those_of_a_logger_that_does_not_answer_are_bounded(taps, ingest):
    ingest.acknowledging = False
    tap = taps.start()
    for number in range(2000):
        begin(tap, f"r{number}").end("OK")
    await taps.close(tap)
    tap = taps.start(ingest.target)
    await ingest.until(lambda: most(ingest.calls) == 1024)
    assert not await tap.drain(0.2)
    assert (most(ingest.calls), tap.unacknowledged) == (1024, 1024)
    ingest.acknowledging = True
    await taps.close(tap)
    assert await taps.start(ingest.target).drain(HANG_S)
    assert [record.request_id for record in ingest.records] == [f"r{number}" for number in range(2000)]
    assert ingest.messages < 50


async def test_large_records_are_bounded_in_bytes_too(taps, ingest):
    ingest.acknowledging = False
    tap = taps.start(memory=1 << 30)
    for _ in range(20):
        begin(tap, prompt="x" * (3 << 20)).end("OK")
    await written(tap)
    await taps.close(tap)
    tap = taps.start(ingest.target)
    await ingest.until(lambda: most(ingest.calls) == 6)
    assert not await tap.drain(0.2)
    assert tap.unacknowledged == 6, "16 MiB, and the record that went beyond"


MOMENTS = 30 if full.FULL else 10


async def test_it_can_be_closed_at_any_moment(taps, ingest):
    ingest.end_after = 0  # Calls end, and new ones begin, all the time.
    for moment in range(MOMENTS):
        tap = taps.start(ingest.target)
        begin(tap, f"r{moment}").end("OK")
        calls = len(ingest.calls)
        await ingest.until(lambda calls=calls: len(ingest.calls) > calls)
        for _ in range(moment % 10):
            await asyncio.sleep(0.001)
        await taps.close(tap)
    ingest.end_after = None
    assert await taps.start(ingest.target).drain(HANG_S)
    assert {record.request_id for record in ingest.records} == {f"r{moment}" for moment in range(MOMENTS)}


async def test_a_close_writes_what_is_put_whatever_segments_it_takes(taps):
    tap = taps.start()
    for _ in range(10):
        begin(tap, prompt="x" * (3 << 20)).end("OK")
    await taps.close(tap)
    assert (tap.spooled, tap.queued_bytes) == (10, 0)


async def test_records_left_by_a_drain_are_sent_after_the_next_start(taps, ingest):
    tap = taps.start()
    for number in range(10):
        begin(tap, f"r{number}").end("OK")
    assert not await tap.drain(0.1)
    await taps.close(tap)
    [left] = folders(taps.spool)
    tap = taps.start(ingest.target)
    begin(tap, "new").end("OK")
    assert await tap.drain(HANG_S)
    assert left not in folders(taps.spool)
    by_source = {request.source: [] for request in ingest.requests}
    for request in ingest.requests:
        by_source[request.source].append(request.record.request_id)
    assert by_source.pop(left.name) == [f"r{number}" for number in range(10)]
    assert list(by_source.values()) == [["new"]]


async def test_an_empty_drain_ends_at_once_even_if_the_logger_is_away(taps):
    tap = taps.start()
    assert await tap.drain(0)
    begin(tap)
    await written(tap)
    assert await tap.drain(5), "what has not ended is not to be sent"


async def test_while_the_logger_is_away_records_pile_up_on_disk_and_not_in_memory(taps):
    target = away()
    tap = taps.start(target, spool_max=1 << 20)
    before = psutil.Process().memory_info().rss
    for number in range(3000):
        with begin(tap, f"r{number}", prompt="x" * 2000) as recording:
            recording.chunk("y" * 2000, [1])
            recording.end("OK")
        if number % 50 == 0:
            await written(tap)
    await written(tap)
    assert tap.unacknowledged <= 1024
    on_disk = sum(path.stat().st_size for path in segments(taps.spool))
    assert (1 << 20) * 0.9 < tap.spooled_bytes <= 1 << 20 < on_disk <= (1 << 20) * 17 // 16
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert tap.dropped[FULL] > 1000
    kept = 3000 - tap.dropped[FULL]
    async with listening(target) as ingest:
        assert await tap.drain(HANG_S)
        records = ingest.records
        await until(lambda: len(segments(taps.spool)) <= 3)  # The next two too.
        with begin(tap, "after") as recording:
            recording.chunk("whole", [1])
            recording.end("OK")
        assert await tap.drain(HANG_S)
        [after] = ingest.records[len(records) :]
    # A dropped begin drops its record; a dropped chunk makes it incomplete.
    whole = [record for record in records if not record.incomplete]
    assert all(len(record.text) == 2000 for record in whole)
    assert all(record.status == "OK" and not record.text for record in records if record.incomplete)
    assert len(whole) == kept
    assert len({record.request_id for record in records}) == len(records)
    assert (after.text, after.incomplete) == ("whole", False)


async def test_ends_are_kept_when_the_spool_is_full(taps):
    target = away()
    tap = taps.start(target, spool_max=200_000)
    open_ones = [begin(tap, f"r{number}") for number in range(200)]
    assert all([await recording.flushed() for recording in open_ones])
    await written(tap)
    for number in range(1000):
        if not tap.dropped[FULL]:
            open_ones[number % 20].chunk("x" * 5000, [1])
            await written(tap)
    for recording in open_ones:
        recording.end("OK", message="m" * 400, text="text" * 1000)
    await written(tap)
    lost = begin(tap, "too late")
    assert await lost.flushed(), "no request waits for room"
    assert not await tap.drain(0)
    async with listening(target) as ingest:
        assert await tap.drain(HANG_S)
    assert {record.request_id for record in ingest.records} == {f"r{number}" for number in range(200)}
    assert {record.status for record in ingest.records} == {"OK"}
    assert sum(record.incomplete for record in ingest.records) == 1


async def test_a_stop_with_a_full_spool_loses_no_answer(taps):
    target = away()
    tap = taps.start(target, spool_max=1 << 20)
    open_ones = [begin(tap, f"r{number}") for number in range(10)]
    assert all([await recording.flushed() for recording in open_ones])
    while tap.dropped[FULL] < 20:  # The last ones are small enough to fill the rest.
        begin(tap, "other", prompt="x" * (20 if tap.dropped[FULL] else 2000)).end("OK")
        await written(tap)
    for recording in open_ones:
        recording.chunk("answer", [1])
        recording.end("OK", text="answer")
    assert not await tap.drain(0.1)
    await taps.close(tap)
    async with listening(target) as ingest:
        assert await taps.start(target).drain(HANG_S)
    ended = [record for record in ingest.records if record.request_id != "other"]
    assert [(record.status, record.text) for record in ended] == [("OK", "answer")] * 10


@pytest.mark.parametrize(("spool_max", "is_kept"), [(20_000, True), (100, False)])
async def test_a_record_in_one_frame_loses_its_tensors_if_there_is_no_room_for_them(taps, spool_max, is_kept):
    target, rules = away(), PayloadRules(tensor_bytes=1 << 20)
    tap = taps.start(target, rules, spool_max=spool_max)
    tensors = [RecordedTensor("x", "UINT8", (50_000,), bytes(50_000))]
    begin(tap, prompt="prompt", inputs=tensors).end("OK", outputs=tensors)
    await written(tap)
    assert tap.dropped == {FULL: 1}
    async with listening(target) as ingest:
        assert await tap.drain(HANG_S)
    assert len(ingest.records) == is_kept
    for record in ingest.records:
        assert (record.prompt, record.status, record.incomplete) == ("prompt", "OK", True)
        assert [(tensor.size, tensor.data) for tensor in (*record.inputs, *record.outputs)] == [(50_000, b"")] * 2


async def test_a_long_stream_keeps_no_segment(taps, ingest):
    tap = taps.start(ingest.target, spool_max=1 << 20)
    long = begin(tap, "long", prompt="x" * 1000)
    texts = []
    for number in range(2000):
        if number % 10 == 0:
            texts.append(f"chunk {number} ")
            long.chunk(texts[-1], [number])
        begin(tap, f"r{number}", prompt="x" * 1000).end("OK")
        if number % 20 == 0:
            await written(tap)
            await until(lambda: tap.spooled_bytes < 900_000)
    long.end("OK")
    assert await tap.drain(HANG_S)
    assert tap.dropped == {}
    assert len(ingest.records) == 2001
    record = ingest.records[-1]
    assert (record.request_id, record.text, len(record.chunks)) == ("long", "".join(texts), len(texts))
    assert not record.incomplete
    await until(lambda: len(segments(taps.spool)) <= 3)  # The next two too.


VICTIM = """
import asyncio, sys
from pathlib import Path
from headrace.payload.parts import Begin
from tests.support.payload_ingest import tap_of

async def main():
    tap = tap_of(sys.argv[1], spool=Path(sys.argv[2]))
    tap.start()
    for number in range(20):
        with tap.begin(Begin(request_id=f"ended-{number}", model="m", protocol="p", prompt="prompt")) as recording:
            recording.chunk("whole ", [1])
            recording.chunk("answer", [2])
            recording.end("OK")
    cut_off = []
    for number in range(5):
        recording = tap.begin(Begin(request_id=f"open-{number}", model="m", protocol="p", prompt="prompt"))
        recording.chunk("so far", [1])
        assert await recording.flushed()
        cut_off.append(recording)
    while tap.queued_bytes:
        await asyncio.sleep(0.01)
    print("written", flush=True)
    for number in range(1_000_000):
        recording = tap.begin(Begin(request_id=f"load-{number}", model="m", protocol="p", prompt="prompt"))
        assert await recording.flushed()
        print(f"load-{number}", flush=True)
        recording.chunk("text", [1])
        recording.end("OK")
        await asyncio.sleep(0)

asyncio.run(main())
"""


@contextmanager
def victim(target, spool):
    command = (sys.executable, "-c", VICTIM, target, str(spool))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("logger_is", ["here", "away"])
async def test_a_process_that_is_killed_loses_no_request(taps, ingest, logger_is):
    seen = []
    with victim(ingest.target if logger_is == "here" else away(), taps.spool) as process:
        while len(seen) < 200:
            seen.append((await asyncio.to_thread(process.stdout.readline)).strip())
        os.kill(process.pid, signal.SIGKILL)
        seen += process.stdout.read().splitlines()
    assert seen[0] == "written"
    [left] = folders(taps.spool)
    tap = taps.start(ingest.target)
    assert await tap.drain(HANG_S)
    assert left not in folders(taps.spool)
    records = {}
    for record in ingest.records:
        assert record.request_id not in records
        records[record.request_id] = record
    for number in range(20):
        record = records.pop(f"ended-{number}")
        assert (record.status, record.text, record.prompt) == ("OK", "whole answer", "prompt")
    for number in range(5):
        record = records.pop(f"open-{number}")
        assert (record.status, record.text, record.failed_hop) == ("ABORTED", "so far", "transformer")
    assert records.keys() >= set(seen[1:]), "every request whose first chunk could leave"
    assert {record.status for record in records.values()} <= {"OK", "ABORTED"}


async def test_two_processes_share_a_root_and_one_takes_over_the_other_s_spool(taps, ingest):
    with victim(away(), taps.spool) as process:
        assert await asyncio.to_thread(process.stdout.readline) == "written\n"
        tap = taps.start(ingest.target)
        assert len(folders(taps.spool)) == 2
        begin(tap, "mine").end("OK")
        assert await tap.drain(HANG_S)
        assert [record.request_id for record in ingest.records] == ["mine"], "what somebody holds is let alone"
    await taps.close(tap)
    assert await taps.start(ingest.target).drain(HANG_S)
    assert {record.request_id for record in ingest.records} >= {f"ended-{number}" for number in range(20)}
    assert len(folders(taps.spool)) == 1


async def test_an_interrupted_takeover_is_taken_over_itself(taps, ingest):
    with victim(away(), taps.spool) as process:
        assert await asyncio.to_thread(process.stdout.readline) == "written\n"
    ingest.end_after = 7
    for _ in range(3):
        tap = taps.start(ingest.target)
        calls = len(ingest.calls)
        await ingest.until(lambda calls=calls: len(ingest.calls) > calls + 1)
        await taps.close(tap)
    ingest.end_after = None
    assert await taps.start(ingest.target).drain(HANG_S)
    by_request = Counter(record.request_id for record in ingest.records)
    assert set(by_request.values()) == {1}
    assert by_request.keys() >= {f"open-{number}" for number in range(5)}


async def test_a_full_disk_affects_no_request_and_recording_recovers(tmp_path):
    with small_disk(tmp_path / "disk", kilobytes=512) as disk:
        taps, target = Taps(disk.path / "spool"), away()
        tap = taps.start(target)
        whole, broken = [], []
        for number in range(200):
            with begin(tap, f"r{number}", prompt="x" * 2000) as recording:
                assert await recording.flushed()
                recording.chunk("y" * 2000, [1])
                recording.end("OK")
            await written(tap)
            (broken if tap.dropped else whole).append(f"r{number}")
        assert tap.dropped[DISK] > 0
        assert len(whole) > 50
        async with listening(target) as ingest:
            assert await tap.drain(HANG_S)
            assert {record.request_id for record in ingest.records if not record.incomplete} >= set(whole[:-1])

            async def recovered():
                with begin(tap, "after") as recording:
                    await recording.flushed()
                    recording.chunk("text", [1])
                    recording.end("OK")
                assert await tap.drain(HANG_S)
                return any(record.request_id == "after" and record.text == "text" for record in ingest.records)

            await until(recovered)
            assert {record.status for record in ingest.records} == {"OK"}
        await taps.close_all()


@pytest.mark.parametrize("status", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_a_record_that_the_logger_refuses_blocks_no_other(taps, ingest, monkeypatch, caplog, status):
    monkeypatch.setitem(payload_shipper._MAX_REFUSALS, status, 3)
    monkeypatch.setattr(payload_shipper, "_MAX_BACKOFF_S", 0.1)
    poison = {"r3", "r4", "r9"}
    ingest.refuses = lambda request: status if request.record.request_id in poison else None
    tap = taps.start(ingest.target)
    for n in range(12):
        begin(tap, f"r{n}").end("OK")
    assert await tap.drain(HANG_S)
    assert [record.request_id for record in ingest.records] == [f"r{n}" for n in range(12) if f"r{n}" not in poison]
    assert tap.dropped[REFUSED] == 3
    assert sum("which is dropped" in message for message in caplog.messages) == 3
    begin(tap, "later").end("OK")
    assert await tap.drain(HANG_S)
    assert ingest.records[-1].request_id == "later"


async def test_a_logger_that_was_away_for_long_refuses_no_record(taps, ingest, monkeypatch):
    monkeypatch.setattr(payload_shipper, "_MAX_BACKOFF_S", 0.02)
    tap = taps.start(ingest.target)
    ingest.refuses = lambda request: grpc.StatusCode.UNAVAILABLE
    begin(tap).end("OK")
    await until(lambda: len(ingest.calls) > 30)
    ingest.refuses = lambda request: None
    assert await tap.drain(HANG_S)
    assert len(ingest.records) == 1
    assert tap.dropped[REFUSED] == 0
