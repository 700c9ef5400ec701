"""What is read of an outbox whose process has died: every record, whatever is damaged, under the same numbers again."""

import os
import uuid

import pytest

from headrace.payload.outbox import BEGIN, MORE, WHOLE, open_outboxes
from headrace.payload.reader import OutboxReader
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord

A, B, C = (uuid.UUID(int=number).bytes for number in range(1, 4))


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


def taken_over(root):
    """The records that the next process reads, by their sequences, and how often it found damage."""
    own, [orphan] = open_outboxes(root, 1 << 20)
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
