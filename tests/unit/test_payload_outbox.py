"""The outbox: what is appended is read back, whatever is damaged, and folders are taken over once."""

import os
import uuid

import pytest

from headrace.errors import StartupError
from headrace.payload import outbox as payload_outbox
from headrace.payload.drops import DISK, FULL
from headrace.payload.frames import BEGIN, MORE, WHOLE, frames
from headrace.payload.outbox import open_outboxes

ID = uuid.UUID(int=1).bytes


@pytest.fixture
def root(tmp_path):
    return tmp_path / "spool"


def test_frames_are_read_as_they_were_appended(root):
    own, _ = open_outboxes(root, 1 << 20)
    for kind, contents in ((BEGIN, b"a"), (MORE, b""), (WHOLE, bytes(1000))):
        assert own.append(kind, ID, contents)
    [segment] = own.segments
    found = [frame for _, frame in frames(segment.read(0), 0, segment.used)]
    assert found == [(BEGIN, 1, ID, b"a"), (MORE, 2, ID, b""), (WHOLE, 3, ID, bytes(1000))]
    assert own.size == segment.used
    assert oct(segment.path.stat().st_mode & 0o777) == oct(0o600)


def test_an_outbox_is_bounded_and_has_room_once_segments_are_deleted(root):
    own, _ = open_outboxes(root, 1 << 20)
    appended = 0
    while own.append(WHOLE, ID, bytes(5000)) or own.refusal is None:
        own.prepare(0)
        appended += 1
    assert own.refusal == FULL
    assert (1 << 20) * 0.9 < own.size <= 1 << 20
    assert own.delete_before(own.segments[4].number)
    own.prepare(0)
    assert own.append(WHOLE, ID, bytes(5000))
    own.prepare(1 << 20)
    assert own.refusal == FULL, "the outboxes of ended processes count too"


def test_a_frame_may_be_larger_than_a_segment_and_one_without_room_takes_none_from_others(root):
    own, _ = open_outboxes(root, 1 << 20)
    assert not own.append(WHOLE, ID, bytes(200_000))
    own.prepare(0)
    assert own.append(WHOLE, ID, bytes(200_000))
    for _ in range(10):
        own.prepare(0)
        assert not own.append(WHOLE, ID, bytes(900_000))
        own.prepare(0)
        assert own.refusal == FULL
        assert own.append(WHOLE, ID, bytes(30_000))
    assert len(own.segments) <= 8


def no_room(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("reason", [FULL, DISK])
def test_ends_of_records_that_have_begun_have_room_of_their_own(root, monkeypatch, reason):
    own, _ = open_outboxes(root, 1 << 20)
    if reason == DISK:
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    while own.append(BEGIN, ID, bytes(5000)) or own.refusal is None:
        own.prepare(0)
    assert own.refusal == reason
    ends = 0
    while own.append(WHOLE, ID, bytes(5000), is_end=True):
        assert not own.append(BEGIN, ID, b"a"), "nothing else takes it"
        own.prepare(0)
        ends += 1
    assert ends >= 12
    assert sum(path.stat().st_size for path in root.glob("*/*.segment")) <= (1 << 20) * 17 // 16
    monkeypatch.undo()
    own.delete_before(own.newest)
    own.prepare(0)
    assert own.append(BEGIN, ID, b"a")


def test_folders_without_an_owner_are_taken_over_once_and_removed_when_they_are_empty(root):
    own, _ = open_outboxes(root, 1 << 20)
    own.append(WHOLE, ID, b"a")
    (root / "foreign").mkdir()
    other, orphans = open_outboxes(root, 1 << 20)
    assert orphans == []
    own.close()
    third, [orphan] = open_outboxes(root, 1 << 20)
    assert orphan.source == own.source
    assert open_outboxes(root, 1 << 20)[1] == []
    orphan.remove()
    other.remove()
    third.remove()
    assert {path.name for path in root.iterdir()} >= {"lock", "foreign"}
    assert not (root / own.source).exists()


def test_a_root_that_stays_locked_is_a_startup_error(root, monkeypatch):
    own, _ = open_outboxes(root, 1 << 20)
    monkeypatch.setattr(payload_outbox, "_ROOT_WAIT_S", 0.05)
    with payload_outbox._locked(root), pytest.raises(StartupError, match="cannot be used"):
        open_outboxes(root, 1 << 20)
    own.remove()


def test_a_folder_that_cannot_be_used_is_a_startup_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot be used"):
        open_outboxes(tmp_path / "file", 1 << 20)
