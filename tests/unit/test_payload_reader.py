"""What is read of an outbox whose process has died: every record, whatever is damaged, under the same numbers again."""

import os
import uuid

import pytest

from headrace.payload.frames import BEGIN, MORE, WHOLE
from headrace.payload.outbox import open_outboxes
from headrace.payload.reader import OutboxReader
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord

A, B, C, D = (uuid.UUID(int=number).bytes for number in range(1, 5))


@pytest.fixture
def own(tmp_path):
    return open_outboxes(tmp_path, 1 << 20)[0]


def kill(outbox):
    """As if its process was killed."""
    os.close(outbox._held)


def append(outbox, kind, record_id, **fields):
    contents = PayloadRecord(record_id=str(uuid.UUID(bytes=record_id)), **fields).SerializeToString()
    while not outbox.append(kind, record_id, contents):
        assert outbox.refusal is None
        outbox.prepare(0)


def taken_over(root, before=lambda: None):
    """The records that the next process reads, by their sequences, and how often it found damage."""
    own, [orphan] = open_outboxes(root, 1 << 20)
    before()
    damage = []
    reader = OutboxReader(orphan, "here", lambda: damage.append(True), aborts=True)
    found = []
    while (one := reader.next()) is not None:
        found.append((one[1].number, PayloadRecord.FromString(one[1].contents)))
    own.remove()
    orphan.close()
    return found, len(damage)


def test_records_without_an_end_are_aborted_under_the_same_ascending_numbers_each_time(own, tmp_path):
    append(own, BEGIN, A, request_id="a")
    append(own, BEGIN, B, request_id="b")
    append(own, MORE, B, chunks=[PayloadChunk(offset_ms=7, text="so far")])
    append(own, WHOLE, C, request_id="c", status="OK")
    append(own, BEGIN, A, request_id="a")  # A copy, after which the old one may be deleted.
    kill(own)
    found, damage = taken_over(tmp_path)
    assert (found, damage) == taken_over(tmp_path)
    assert damage == 0
    assert [record.request_id for _, record in found] == ["c", "b", "a"]
    assert [number for number, _ in found] == sorted({number for number, _ in found})
    _, b, _ = (record for _, record in found)
    assert (b.status, b.failed_hop, b.chunks[0].text, b.duration_ms) == ("ABORTED", "here", "so far", 7)
    assert b.message


def test_a_frame_within_which_the_process_was_killed_is_no_damage(own, tmp_path):
    append(own, BEGIN, A, request_id="a")
    at = own.size
    append(own, MORE, A, chunks=[PayloadChunk(text="x" * 100)])
    own._newest.mapped[at : at + 33] = bytes(33)  # It has no header yet.
    kill(own)
    [(_, record)], damage = taken_over(tmp_path)
    assert (damage, record.incomplete, len(record.chunks)) == (0, False, 0)


@pytest.mark.parametrize("place", [6, 40, None], ids=["length", "contents", "all before it"])
@pytest.mark.parametrize("is_last", [True, False])
def test_damage_is_counted_once_and_makes_open_records_incomplete(own, tmp_path, place, is_last):
    append(own, BEGIN, A, request_id="a")
    at = own.size
    append(own, WHOLE, B, request_id="b", status="OK")
    append(own, WHOLE, C, request_id="c", status="OK", message="m" * 20)
    segment = own._newest
    for damaged in range(at, segment.used - 20) if place is None else [at + place]:
        segment.mapped[damaged] ^= 0x55
    if not is_last:
        append(own, WHOLE, D, prompt="p" * 65_300)
    assert (own.newest == segment.number) == is_last
    kill(own)
    found, damage = taken_over(tmp_path)
    *others, a = (record for _, record in found)
    assert (damage, a.request_id, a.status, a.incomplete) == (1, "a", "ABORTED", True)
    assert [record.request_id for record in others] == ["c"] * (place == 40) + [""] * (not is_last)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_follows_an_unreadable_or_missing_segment_is_read(own, tmp_path, is_known):
    append(own, BEGIN, A, request_id="a")
    for record_id in (B, C, D):
        append(own, WHOLE, record_id, prompt="p" * 60_000)
    assert len(own.segments) == 3
    unlink = own.segments[1].path.unlink
    if not is_known:
        unlink()
    kill(own)
    found, damage = taken_over(tmp_path, unlink if is_known else lambda: None)
    assert [record.record_id[-1] for _, record in found] == ["2", "4", "1"]
    assert (damage, found[-1][1].incomplete) == (is_known, is_known)
