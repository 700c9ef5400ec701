"""The spool: it opens after any crash or disk fault, and whole frames are read once and in order."""

import logging
import stat
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import StartupError
from headrace.payload.outbox import spool as payload_spool
from headrace.payload.outbox.segments import PAYLOAD_START, SpoolReader, header
from headrace.payload.outbox.spool import open_spools
from tests.support.payload_ingest import folders, no_room, segments

MAX_BYTES = 8 * 200  # So that a segment takes 200 bytes.
NOWHERE_ELSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def read_all(spool):
    reader, frames = SpoolReader(spool), []
    while some := reader.read():
        frames += some
    return frames


def crashed(root, payloads, max_bytes=MAX_BYTES):
    """A spool folder with payloads whose process is gone."""
    spool, _ = open_spools(root, max_bytes)
    for payload in payloads:
        spool.append([payload])
    spool.close()


def taken_over(root):
    """The frames that the next process reads from the one folder that is left, which it removes."""
    own, orphans = open_spools(root, MAX_BYTES)
    frames = [frame for orphan in orphans for frame in read_all(orphan)]
    own.remove()
    for orphan in orphans:
        orphan.remove()
    return frames


@pytest.fixture
def root(tmp_path):
    return tmp_path / "spool"


def test_a_journal_alone_is_taken_over_and_an_empty_one_is_removed(root):
    crashed(root, [])
    killed, orphans = open_spools(root, MAX_BYTES)
    assert not orphans
    assert killed.journal.put(b"id", b"frame")
    killed.close()
    own, [orphan] = open_spools(root, MAX_BYTES)
    assert (orphan.journaled(), read_all(orphan)) == ([b"frame"], [])
    orphan.remove()
    own.remove()
    assert not folders(root)


def test_a_journal_is_not_used_while_the_disk_fails(root, monkeypatch):
    spool, _ = open_spools(root, MAX_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(payload_spool.os, "write", no_room)
        with suppress(OSError):
            spool.append([b"frame"])
        assert spool.journal is None
    spool.append([b"frame"])
    assert spool.journal is not None
    spool.remove()


@NOWHERE_ELSE
@given(batches=st.lists(st.lists(st.binary(min_size=1, max_size=300), min_size=1)))
def test_appended_frames_are_read_in_order_and_numbered_from_one(root, batches):
    spool, orphans = open_spools(root, MAX_BYTES)
    assert not orphans
    reader, read = SpoolReader(spool), []
    for number, batch in enumerate(batches):
        spool.append(batch)
        if number % 3 == 0:
            read += reader.read()
    while some := reader.read():
        read += some
    payloads = [payload for batch in batches for payload in batch]
    assert read == list(enumerate(payloads, 1))
    assert spool.next_number == len(payloads) + 1
    assert spool.size == sum(path.stat().st_size for path in segments(root))
    spool.remove()
    assert not folders(root)


def test_a_frame_larger_than_a_read_and_a_segment_is_read_whole(root):
    spool, _ = open_spools(root, MAX_BYTES)
    large = bytes(range(256)) * 4096
    spool.append([b"before", large])
    spool.append([b"after"])
    assert read_all(spool) == [(1, b"before"), (2, large), (3, b"after")]
    spool.close()


def test_a_spool_cut_off_at_any_byte_opens_with_every_frame_before_it(root, caplog):
    payloads = [f"payload {number:02}".encode() * 2 for number in range(9)]
    crashed(root, payloads)
    paths = segments(root)
    assert len(paths) > 1
    kept = {path.relative_to(root): path.read_bytes() for path in paths}
    last = paths[-1].read_bytes()
    frame = 8 + len(payloads[0])
    before_last = len(payloads) - len(last) // frame
    for cut in range(len(last) + 1):
        for path, data in kept.items():
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(data)
        paths[-1].write_bytes(last[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            frames = taken_over(root)
        assert frames == list(enumerate(payloads[: before_last + cut // frame], 1))
        assert len(caplog.records) == (cut % frame > 0), "a torn frame is logged once"
    assert not folders(root)


@NOWHERE_ELSE
@given(data=st.data())
def test_a_damaged_byte_loses_one_frame(root, caplog, data):
    payloads = [PAYLOAD_START + f"payload {number:02}".encode() * 2 for number in range(20)]
    crashed(root, payloads)
    paths = segments(root)
    damaged = data.draw(st.integers(0, len(paths) - 1))
    contents = bytearray(paths[damaged].read_bytes())
    at = data.draw(st.integers(0, len(contents) - 1))
    contents[at] ^= data.draw(st.integers(1, 255))
    frame = 8 + len(payloads[0])
    length = int.from_bytes(contents[at // frame * frame :][:4], "little")
    if length != len(payloads[0]) and (8 + length) % frame == 0:
        contents[at // frame * frame] ^= 1  # The damage is not in the length of several frames.
    paths[damaged].write_bytes(contents)
    lost = int(paths[damaged].stem) + at // frame
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        frames = taken_over(root)
    assert frames == [frame for frame in enumerate(payloads, 1) if frame[0] != lost]
    [warning] = caplog.records
    assert "damaged" in warning.getMessage()


@pytest.mark.parametrize("cut_off", [False, True])
def test_lost_frames_are_counted_except_at_a_torn_end(root, cut_off):
    payloads = [PAYLOAD_START + b"x" * 100 for _ in range(5)]
    spool, _ = open_spools(root, MAX_BYTES * 1000)
    spool.append(payloads)
    [path] = segments(root)
    contents = bytearray(path.read_bytes())
    contents[-60] ^= 1
    path.write_bytes(contents[:-1] if cut_off else contents)
    if cut_off:
        spool._segments[-1] = spool._segments[-1]._replace(size=len(contents) - 1)
    lost = []
    reader = SpoolReader(spool, lambda: lost.append(True))
    frames = [frame for _ in range(4) for frame in reader.read()]
    assert [number for number, _ in frames] == [1, 2, 3, 4]
    assert len(lost) == (not cut_off)
    spool.append([PAYLOAD_START + b"later"])
    spool.close()


def test_a_caller_s_text_that_looks_like_a_frame_is_not_read_as_one(root):
    forged = PAYLOAD_START + b"forged" * 10
    payloads = [PAYLOAD_START + b"mine" + header(forged) + forged + b"more", PAYLOAD_START + b"after"]
    crashed(root, payloads)
    path = segments(root)[0]
    contents = bytearray(path.read_bytes())
    contents[10] ^= 1
    path.write_bytes(contents)
    assert taken_over(root) == [(2, payloads[1])]


def test_zeros_that_a_power_cut_left_are_no_frames(root):
    crashed(root, [b"kept"])
    [path] = segments(root)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert taken_over(root) == [(1, b"kept")]


def test_the_segment_after_a_missing_or_unreadable_one_is_read(root):
    spool, _ = open_spools(root, MAX_BYTES)
    for number in range(12):
        spool.append([b"%03d" % number * 20])
    segments(root)[0].unlink()
    frames = read_all(spool)
    assert frames[-1] == (12, b"011" * 20)
    assert frames[0][0] == spool.segments[1].first
    spool.close()


@pytest.mark.parametrize("written", [0, 1, 30])
def test_a_failed_append_leaves_nothing(root, monkeypatch, written):
    spool, _ = open_spools(root, MAX_BYTES)
    spool.append([b"before"])
    write = payload_spool.os.write
    room = written

    def full(file, data):
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = write(file, data[:room])
        room -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(payload_spool.os, "write", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                spool.append([b"lost" * 3, b"lost" * 9])
            room = written
    size = sum(path.stat().st_size for path in segments(root))
    assert spool.size == size == 8 + len(b"before")
    spool.append([b"after"])
    assert read_all(spool) == [(1, b"before"), (2, b"after")]
    spool.close()
    assert taken_over(root) == [(1, b"before"), (2, b"after")]


def test_a_write_that_found_the_disk_full_can_be_repeated(root, monkeypatch):
    spool, _ = open_spools(root, 1 << 20)
    spool.append([b"shipped"])
    reader = SpoolReader(spool)
    reader.read()
    spool.delete_before(reader.number)
    assert len(segments(root)) == 1, "the one that is written stays"

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(payload_spool.os, "write", no_room)
        spool.append([b"lost"])
    spool.delete_before(reader.number)
    assert (segments(root), spool.size) == ([], 0)
    spool.append([b"after"])
    assert reader.read() == [(2, b"after")]
    spool.close()


def test_segments_are_deleted_once_all_their_frames_are_shipped(root):
    spool, _ = open_spools(root, MAX_BYTES)
    for number in range(1, 31):
        spool.append([b"%03d" % number * 20])
    for number in range(1, 32):
        spool.delete_before(number)
        frames = read_all(spool)
        assert frames[0][0] <= number
        assert frames[-1][0] == 30
        assert spool.size == sum(path.stat().st_size for path in segments(root))
    assert len(segments(root)) == 1
    spool.close()


def test_frames_are_appended_only_at_the_expected_number(root):
    spool, _ = open_spools(root, MAX_BYTES)
    assert spool.append_at(1, [b"a", b"b"])
    assert not spool.append_at(2, [b"c"])
    assert spool.append_at(3, [b"c"])
    assert [payload for _, payload in read_all(spool)] == [b"a", b"b", b"c"]
    spool.close()


def test_a_folder_belongs_to_one_process_until_it_lets_go(root):
    first, orphans = open_spools(root, MAX_BYTES)
    first.append([b"of the first"])
    second, none = open_spools(root, MAX_BYTES)
    assert (orphans, none) == ([], [])
    assert first.source != second.source
    assert {path.name for path in folders(root)} == {first.source, second.source}
    second.append([b"of the second"])
    first.close()
    third, [orphan] = open_spools(root, MAX_BYTES)
    assert orphan.source == first.source
    assert read_all(orphan) == [(1, b"of the first")]
    fourth, none = open_spools(root, MAX_BYTES)
    assert none == [], "it is taken over by one"
    assert read_all(second) == [(1, b"of the second")]
    for spool in (second, third, orphan, fourth):
        spool.remove()
    assert not folders(root)


def test_an_orphan_is_not_deleted_before_all_of_it_is_shipped(root):
    crashed(root, [b"x" * 100] * 5)
    own, [orphan] = open_spools(root, MAX_BYTES)
    read_all(orphan)
    orphan.delete_before(6)
    assert read_all(orphan)[-1] == (5, b"x" * 100), "the number of frames in its last segment is not recorded"
    orphan.remove()
    assert orphan.size == 0
    own.remove()


def test_empty_folders_of_a_crash_are_removed_and_foreign_files_stay(root):
    crashed(root, [])
    (root / "notes").mkdir()
    (root / "readme").touch()
    own, orphans = open_spools(root, MAX_BYTES)
    assert not orphans
    assert {path.name for path in folders(root)} == {own.source, "notes"}
    own.remove()
    assert (root / "readme").exists()


def test_only_the_owner_may_read_the_spool(root):
    spool, _ = open_spools(root, MAX_BYTES)
    spool.append([b"secret"])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (root, *folders(root))}
    assert modes == {0o700}
    assert stat.S_IMODE(segments(root)[0].stat().st_mode) == 0o600
    spool.close()


def test_a_root_that_stays_locked_is_a_startup_error(root, monkeypatch):
    spool, _ = open_spools(root, MAX_BYTES)
    monkeypatch.setattr(payload_spool, "_ROOT_WAIT_S", 0.05)
    with payload_spool._locked(root), pytest.raises(StartupError, match="cannot be used"):
        open_spools(root, MAX_BYTES)
    spool.close()


def test_room_on_the_disk_is_reserved_and_given_back(root, monkeypatch):
    spool, _ = open_spools(root, 1 << 20)
    [kept] = root.glob("*/reserve")
    assert kept.stat().st_size > 0
    assert spool.release_reserve()
    assert not spool.release_reserve()
    assert not kept.exists()

    with monkeypatch.context() as patch:
        patch.setattr(payload_spool.Path, "write_bytes", no_room)
        assert not spool.reserve()
    assert spool.reserve()
    spool.append([b"kept"])
    spool.close()
    own, [orphan] = open_spools(root, 1 << 20)
    assert not kept.exists(), "the next process needs no room there"
    for spool in (own, orphan):
        spool.remove()
    assert not folders(root)
