"""The journal: what it keeps is in its file until it is freed, and it never waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.payload.outbox import journal as payload_journal
from headrace.payload.outbox.journal import MAX_FRAME_BYTES, Journal, read_journal
from tests.support.payload_ingest import no_room


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(payload_journal.time, "monotonic", lambda: now[0])
    return now


@given(st.lists(st.tuples(st.integers(0, 9), st.binary(min_size=1, max_size=MAX_FRAME_BYTES)), max_size=40))
def test_the_file_has_exactly_the_frames_that_are_not_freed(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("spool") / "journal"
    journal, kept = Journal(path), {}
    for record, frame in steps:
        if record in kept:
            journal.free(bytes([record]))
            del kept[record]
        else:
            assert journal.put(bytes([record]), frame)
            kept[record] = frame
        assert sorted(read_journal(path)) == sorted(kept.values())
    for record in kept:
        journal.free(bytes([record]))
    assert not any(path.read_bytes()), "nothing that is freed stays on the disk"


def test_it_refuses_what_it_has_no_slot_for(path, clock):
    journal = Journal(path)
    assert not journal.put(b"large", b"x" * (MAX_FRAME_BYTES + 1))
    kept = 0
    while journal.put(b"%d" % kept, b"frame"):
        kept += 1
    assert kept == len(read_journal(path)) > 100
    journal.free(b"7")
    journal.free(b"7")
    journal.free(b"unknown")
    assert journal.put(b"again", b"frame")
    assert not journal.put(b"more", b"frame")


def test_it_is_not_used_while_nothing_is_freed(path, clock):
    journal = Journal(path)
    assert journal.put(b"1", b"frame")
    clock[0] += 0.2
    assert journal.put(b"2", b"frame")
    clock[0] += 0.1
    assert not journal.put(b"3", b"frame")
    journal.free(b"1")
    assert journal.put(b"3", b"frame")
    clock[0] += 60
    journal.free(b"2")
    journal.free(b"3")
    clock[0] += 60
    assert journal.put(b"4", b"frame")


def test_without_room_it_leaves_no_file(path, monkeypatch):
    monkeypatch.setattr(payload_journal.os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        Journal(path)
    assert not path.exists()


@pytest.mark.parametrize("contents", [b"", b"\1", b"\xff" * 20_000, b"\0" * 20_000])
def test_a_damaged_file_has_no_frames(path, contents):
    path.write_bytes(contents)
    assert read_journal(path) == []


def test_without_a_file_there_are_no_frames(path, caplog):
    assert read_journal(path) == []
    assert not caplog.records
    path.mkdir()
    assert read_journal(path) == []
    assert "cannot be read: Is a directory" in caplog.text
